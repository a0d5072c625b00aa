"""The gain of this branch: beams hold together what they have in common, however often they are forked."""

from importlib import import_module

from . import gain
from .gain import BLOCK_SIZE, MAX_TOKENS, PROMPT, WIDTH


def test_beams_hold_less_than_as_many_sequences(tmp_path):
    """Each step copies at most one block a beam, all but one, and only where beams share a block that isn't full."""
    counts = gain.now(import_module("..", __package__), tmp_path)
    full, own = len(PROMPT) // BLOCK_SIZE, (MAX_TOKENS - 1) // BLOCK_SIZE
    assert full + own < counts["blocks held at once"] < full + WIDTH * own
    assert 0 < counts["blocks copied"] <= (MAX_TOKENS - 1) * (WIDTH - 1)


def test_the_gain_in_figures(tmp_path):
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "blocks held at once": 18,
        "blocks copied": 14,
        "tokens through the model": len(PROMPT) + WIDTH * (MAX_TOKENS - 1),
    }
