"""python -m models.training --text folder: train a checkpoint."""

from models.training.train import main

if __name__ == "__main__":
    main()
