"""What made models/storyteller: text files into rows, a trainer, an evaluation, and the model card's pictures.

`python -m models.training --text folder` trains, `python -m models.training.evaluate` compares checkpoints, and
`python -m models.training.card` brings the card up to date.
"""
