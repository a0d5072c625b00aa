"""The command: stories as they come, and one line about the pool."""

import re

import pytest

from ..__main__ import PROMPTS, main, show
from ..llm import LLM
from ..sampling import SamplingParams

SUMMARY = (
    r"\d+ tokens/s, first token \d+ ms, KV slots: (?P<held>[\d,]+) of (?P<all>[\d,]+) reserved, "
    r"(?P<used>[\d,]+) used \((?P<share>\d+)%\) \|(?P<strip>[#\-.]+)\|"
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


def test_summary_counts_slots_at_the_peak(run):
    """At the end two requests have a prompt of 2 and 5 of 6 tokens in the pool, and hold 2 blocks of 4 slots each."""
    _, out = run("the", "the", "--kv-cache-tokens", "64", "--block-size", "4")
    summary = re.fullmatch(SUMMARY, out.splitlines()[-1])
    assert summary, out
    assert (summary["held"], summary["all"], summary["used"]) == ("16", "64", "14")
    assert summary["share"] == "88" and summary["strip"] == "########" + "." * 24


def test_without_prompts_there_are_six_beginnings(run):
    code, out = run()
    assert code == 0 and len(PROMPTS) == 6
    assert [out.index(prompt) for prompt in PROMPTS] == sorted(out.index(prompt) for prompt in PROMPTS)


def test_first_story_is_printed_as_it_comes(checkpoint, capsys):
    printed: list[str] = []

    def watched():
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        for output in LLM(checkpoint).stream(["the", "fox"], params):
            yield output
            printed.append(capsys.readouterr().out)

    outputs = show(watched())
    assert printed[0].startswith("the"), "after the first token"
    assert "fox" not in "".join(printed) and "fox" in capsys.readouterr().out, "the second story waits"
    assert [output.prompt for output in outputs] == ["the", "fox"]


def test_seed_decides_the_stories(run):
    def stories(seed: str) -> str:
        return run("the", "--seed", seed, "--temperature", "1")[1].rsplit("\n", 2)[0]

    assert stories("1") == stories("1") != stories("2")


@pytest.mark.parametrize("argv", [["--kv-cache-tokens", "0"], ["--dtype", "int8"], ["--unknown", "3"]], ids=" ".join)
def test_mistake_gives_exit_code_2(run, argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        run("the", *argv)
    assert exit_.value.code == 2 and argv[0][2:].replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_prompt_that_cannot_be_served_gives_exit_code_1(run):
    code, out = run("a" * 100, "the fox")
    assert code == 1
    assert "[0 tokens, the prompt has 101 tokens, max_model_len is 64" in out and "the fox" in out
    assert re.fullmatch(SUMMARY, out.splitlines()[-1])
    assert run("")[1].endswith("nothing was served\n")
