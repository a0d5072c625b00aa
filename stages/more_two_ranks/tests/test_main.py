"""The command prints stories, and a last line about the pool and the counts of this stage."""

import re

import pytest

from ..__main__ import main

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


@pytest.mark.parametrize("flags, num_hits", [((), 4), (("--no-enable-prefix-caching",), 0)])
def test_summary_counts_cached_tokens_unless_the_cache_is_turned_off(run, flags, num_hits):
    """Two stories of one prompt, one after the other."""
    prompt = "the fox and the rabbit"
    _, out = run(prompt, prompt, "--max-num-seqs", "1", "--block-size", "4", *flags)
    counts = re.fullmatch(SUMMARY, out.splitlines()[-1])["counts"]
    assert f"tokens cached: {num_hits} of " in counts


def test_summary_counts_stored_and_loaded_blocks(run):
    """The second story, of 11 tokens, takes all 3 blocks, and the third one loads the full block of the first."""
    prompts = ["the fox and the rabbit", "Once upon a time", "the fox and the rabbit"]
    options = ["--max-num-seqs", "1", "--block-size", "4", "--kv-cache-tokens", "12", "--max-tokens", "1"]
    _, out = run(*prompts, *options, "--offload-policy", "load")
    assert "blocks stored: 2, loaded: 1" in re.fullmatch(SUMMARY, out.splitlines()[-1])["counts"]
