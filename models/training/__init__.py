"""The code that trained models/storyteller. Start reading in train.py.

`python -m models.training --text folder` trains a checkpoint, `python -m models.training.evaluate` compares
checkpoints, `python -m models.training.card` updates the loss curve and the samples of the model card, and
`python -m models.training.seed` chooses the seed of the commands' stories.
"""
