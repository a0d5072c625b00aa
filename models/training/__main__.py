"""Train a checkpoint: python -m models.training --text folder."""

from models.training.train import main

if __name__ == "__main__":
    main()
