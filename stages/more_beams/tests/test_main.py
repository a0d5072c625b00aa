"""The command prints stories, and a last line about the pool and the counts of this stage."""

import re

import pytest

from ..__main__ import main
from ..beam_search import BeamSearchParams
from ..llm import LLM

SUMMARY = (
    r"\d+ tokens/s, first token \d+ ms, KV slots: (?P<held>[\d,]+) of (?P<all>[\d,]+) reserved, "
    r"(?P<used>[\d,]+) used \((?P<share>\d+)%\) \|(?P<strip>[#\-.]+)\|, (?P<counts>.+)"
)


@pytest.fixture
def run(checkpoint, capsys):
    """Return a function that runs the command with some arguments, and returns its exit code and output.

    A story has 6 tokens.
    """

    def command(*argv: str) -> tuple[int, str]:
        code = main(["--model", str(checkpoint), "--max-tokens", "6", "--temperature", "0", *argv])
        return code, capsys.readouterr().out

    return command


def test_command_prints_stories_and_a_summary(run):
    code, out = run("the fox", "the wood")
    first, second, last = out.split("\n\n")
    assert code == 0
    for story, prompt in ((first, "the fox"), (second, "the wood")):
        assert story.startswith(prompt) and story.endswith("  [6 tokens, length]")
    assert re.fullmatch(SUMMARY, last.strip())


def test_summary_counts_preemptions_and_copies(run):
    """Two samples of a prompt of 2 tokens and 6 more need 2 blocks each, and there are 3."""
    _, out = run("the", "--n", "2", "--kv-cache-tokens", "12", "--block-size", "4", "--watermark", "0")
    assert re.fullmatch(SUMMARY, out.splitlines()[-1])["counts"] == "preemptions: 1, blocks copied: 1"


def test_beams_tell_the_story_that_they_find_likeliest(run, checkpoint):
    code, out = run("the fox", "--beam-width", "3")
    [output] = LLM(checkpoint).beam_search("the fox", BeamSearchParams(3, 6))
    story, last = out.split("\n\n")
    assert code == 0 and story.startswith(f"the fox{output.outputs[0].text}  [")
    assert re.fullmatch(SUMMARY, last.strip())


def test_more_beams_than_seats_are_an_error_of_usage(run, capsys):
    with pytest.raises(SystemExit):
        run("the fox", "--beam-width", "3", "--max-num-seqs", "2")
    assert "beam_width is 3, max_num_seqs is 2" in capsys.readouterr().err
