"""The command: a story as it comes, one line about the memory, and one line about a mistake."""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from ...engine import __main__ as command
from ...engine.__main__ import PROMPTS, main, show
from ...engine.llm import LLM
from ...engine.outputs import RequestOutput
from ...engine.sampling_params import SamplingParams
from .helpers import CONFIG, write_checkpoint

SUMMARY = (
    r"\d+ tokens/s, first token \d+ ms, KV slots: (?P<held>[\d,]+) of (?P<all>[\d,]+) reserved, "
    r"(?P<used>[\d,]+) used \((?P<share>\d+)%\) \|(?P<strip>[#\-.]+)\|, "
    r"preemptions: \d+, blocks shared: \d+, copied: \d+, tokens hit: [\d,]+ of [\d,]+, stored: \d+, loaded: \d+"
)


@pytest.fixture
def run(checkpoint, capsys):
    """run("the fox", "--seed", "1") is (exit code, stdout, stderr); a story here has 6 tokens."""

    def command(*argv: str, model=checkpoint):
        code = main(["--model", str(model), "--max-tokens", "6", "--offload-policy", "recompute", *argv])
        return code, *capsys.readouterr()

    return command


def test_it_tells_each_story_and_ends_with_the_summary(run):
    code, out, err = run("the fox", "the wood", "--temperature", "0")
    first, second, last = out.split("\n\n")
    assert code == 0 and err == ""
    for story, prompt in ((first, "the fox"), (second, "the wood")):
        assert story.startswith(prompt) and story.endswith("  [6 tokens, length]")
    assert re.fullmatch(SUMMARY, last.strip())


def test_the_summary_says_what_was_reserved_and_used(run):
    """At the peak each of two requests has its 2 prompt tokens and 5 of its 6 others there: 7 slots of 2 blocks."""
    _, out, _ = run("the", "the", "--temperature", "0", "--kv-cache-tokens", "64", "--block-size", "4")
    summary = re.fullmatch(SUMMARY, out.splitlines()[-1])
    assert summary, out
    assert (summary["held"], summary["all"], summary["used"]) == ("16", "64", "14")
    assert summary["share"] == "88" and summary["strip"] == "#" * 8 + "." * 24


def test_the_summary_counts_the_preemptions(run):
    """Both stories begin in two blocks of two, and each needs four: one gives way."""
    sizes = ("--block-size", "4", "--kv-cache-tokens", "16", "--max-model-len", "16")
    for argv, num_preemptions in ((("the fox",), 0), (("the fox", "the wood"), 1)):
        _, out, _ = run(*argv, "--max-tokens", "10", "--temperature", "0", *sizes)
        assert f"|, preemptions: {num_preemptions}, " in out


def test_the_summary_counts_the_blocks_shared_and_copied(run):
    """Of a prompt of 6 tokens all samples hold the first block, and all but the last copy the second."""
    for num_samples, says in ((1, "blocks shared: 0, copied: 0"), (3, "blocks shared: 1, copied: 2")):
        _, out, _ = run("the fox the fox the", "--n", str(num_samples), "--block-size", "4")
        assert says in out.splitlines()[-1]


def test_the_summary_counts_the_tokens_hit(run):
    """One seat: the second of two prompts of 6 tokens comes when the first is done, and finds its first block."""
    beginning, sizes = "the fox the fox the", ("--max-num-seqs", "1", "--block-size", "4")
    for argv, says in (((), "tokens hit: 4 of 12"), (("--no-enable-prefix-caching",), "tokens hit: 0 of 12")):
        _, out, _ = run(beginning, beginning, *argv, *sizes)
        assert says in out.splitlines()[-1]


def test_the_summary_counts_the_blocks_stored_and_loaded(run):
    """One seat: the second story takes all blocks, and the third begins with what the first one had computed."""
    beginning = "the fox the fox the fox the fox"
    sizes = ("--max-num-seqs", "1", "--kv-cache-tokens", "40", "--max-model-len", "39", "--block-size", "8")
    _, out, _ = run(beginning, "wood " * 10, beginning, "--offload-policy", "load", *sizes)
    stored, loaded = re.search(r"stored: (\d+), loaded: (\d+)$", out.splitlines()[-1]).groups()
    assert int(stored) >= int(loaded) > 0


def test_if_there_is_something_to_choose_the_two_speeds_are_told(run):
    _, out, _ = run("the", "--offload-policy", "auto")
    assert re.search(r"loaded: 0\nload or recompute: copies \d+\.\d GB/s, prefill [\d,]+ tokens/s\n", out)


def test_without_prompts_there_are_six_beginnings(run):
    code, out, _ = run()
    assert code == 0 and len(PROMPTS) == 6
    assert [out.index(prompt) for prompt in PROMPTS] == sorted(out.index(prompt) for prompt in PROMPTS)


def test_the_first_story_is_shown_as_it_comes(checkpoint, capsys):
    def watched():
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        for output in LLM(checkpoint).stream(["the", "fox"], params):
            yield output
            on_screen.append(capsys.readouterr().out)

    on_screen: list[str] = []
    outputs = show(watched())
    assert on_screen[0].startswith("the"), "after the first token"
    assert on_screen[1] == "", "the second story waits"
    assert "fox" in on_screen[-2] + on_screen[-1]
    assert [output.prompt for output in outputs] == ["the", "fox"]


@pytest.mark.parametrize("lengths", [(5, 3, 1), (1, 5, 3), (3, 1, 5)], ids=str)
def test_stories_are_told_in_order_whichever_ends_first(checkpoint, capsys, lengths):
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    show(LLM(checkpoint).stream(["the", "fox", "wood"], params))
    assert [int(length) for length in re.findall(r"\[(\d) tokens, length]", capsys.readouterr().out)] == [*lengths]


def test_the_same_command_tells_the_same_stories_and_another_seed_others(run):
    def stories(seed: str) -> str:
        return run("the", "--seed", seed, "--temperature", "1")[1].rsplit("\n", 2)[0]

    assert stories("1") == stories("1") != stories("2")


def test_the_same_prompt_twice_gets_two_stories(run):
    _, out, _ = run("the", "the", "--temperature", "1", "--max-tokens", "20")
    first, second = out.split("\n\n\n")[0].rsplit("]\n\n", 1)
    assert first.rsplit("[")[0] != second.rsplit("[")[0]


def test_a_pool_not_asked_for_has_room_for_one_sequence_at_least(run, tmp_path, tokenizer_model):
    folder = write_checkpoint(tmp_path, CONFIG | {"max_position_embeddings": 5000}, tokenizer_model=tokenizer_model)
    for longest, says in ((None, "16 of 2,048"), ("100", "16 of 2,048"), ("4001", "16 of 8,000")):
        code, out, _ = run("the", *(["--max-model-len", longest] if longest else []), model=folder)
        assert code == 0 and f"{says} reserved" in out


# Mistakes


@pytest.mark.parametrize(
    "argv, error",
    [
        (["--model", "no/such/folder"], "no/such/folder is not a checkpoint folder: it has no config.json"),
        (["--kv-cache-tokens", "0"], "kv_cache_tokens must be a whole number, at least 1 and below 2**63, not 0"),
        (
            ["--kv-cache-tokens", "9" * 23],
            "kv_cache_tokens must be a whole number, at least 1 and below 2**63, not 999",
        ),
        (["--kv-cache-tokens", "9" * 18], "has no room for a pool"),
        (["--seed", "9" * 23], "seed must be a whole number of 64 bits, not 999"),
        (["--kv-cache-tokens", "9" * 15], "has no room for a pool"),
        (["--kv-cache-tokens", "15"], "a block has 16 slots, the pool would have 15"),
        (["--kv-cache-memory-bytes", "10"], "a block has 16 slots, the pool would have 0"),
        (["--block-size", "0"], "block_size must be a whole number, at least 1, not 0"),
        (["--block-size", "4096"], "a block has 4096 slots, the pool would have 2048"),
        (["--kv-cache-tokens", "9", "--kv-cache-memory-bytes", "9000"], "the pool's size was given 2 times"),
        (["--max-model-len", "65"], "max_model_len is 65, the model has 64 positions"),
        (["--max-model-len", "0"], "max_model_len must be a whole number, at least 1, not 0"),
        (["--device", "warp"], "device 'warp' is not to be had here"),
        (["--temperature", "nan"], "temperature must be 0 or above, not nan"),
        (["--max-tokens", "0"], "max_tokens must be a whole number, at least 1, not 0"),
    ],
    ids=" ".join,
)
def test_a_mistake_gives_one_line_and_exit_code_2(run, argv, error):
    code, out, err = run("the", *argv)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and error in err and err.count("\n") == 1


def test_an_unknown_flag_gives_exit_code_2(run, capsys):
    with pytest.raises(SystemExit) as exit_:
        run("--reservation", "request")
    assert exit_.value.code == 2 and "--reservation" in capsys.readouterr().err


def test_a_prompt_that_cannot_be_served_is_told_and_the_others_go_on(run):
    code, out, err = run("a" * 100, "the fox", "the wood")
    assert code == 1
    assert err == "error: the prompt has 101 tokens; max_model_len 64 leaves room for 63 and one new token\n"
    assert out.index("[0 tokens, error]") < out.index("the fox") < out.index("the wood")
    assert re.fullmatch(SUMMARY, out.splitlines()[-1])


def test_when_nothing_can_be_served_it_says_so(run):
    code, out, err = run("", "--kv-cache-tokens", "64")
    assert code == 1 and "the prompt is empty" in err and out.endswith("nothing was served\n")


def failing(llm: LLM, num_tokens: int) -> Callable[..., list[RequestOutput]]:
    """A stream of two prompts, of which each ends with an error after `num_tokens` tokens."""

    def stream(prompts: list[str], params: SamplingParams):
        for output in LLM.stream(llm, prompts, replace(params, ignore_eos=True)):
            if len(output.outputs[0].token_ids) == num_tokens:
                ended = [replace(output.outputs[0], finish_reason="error")]
                metrics = replace(output.metrics, finished_time=output.metrics.first_token_time + 1)
                yield replace(output, outputs=ended, metrics=metrics, finished=True, error="no more blocks")
            elif len(output.outputs[0].token_ids) < num_tokens:
                yield output

    return stream


def test_an_error_hides_nothing_that_was_generated(checkpoint, monkeypatch, capsys):
    def told(num_tokens: int, *argv: str) -> tuple[int, str, str]:
        llm = LLM(checkpoint, kv_cache_tokens=256)
        if argv:
            monkeypatch.setattr(llm, "stream", failing(llm, num_tokens))
        monkeypatch.setattr(command, "LLM", lambda **options: llm)
        code = main(["--temperature", "0", "--max-tokens", str(num_tokens), "--model", str(checkpoint), "the", "fox"])
        return code, *capsys.readouterr()

    code, out, err = told(5, "failing")
    assert code == 1 and err == "error: no more blocks\n" * 2
    stories = out.replace("error]", "length]").split("\n\n")[:2]
    assert stories == told(5)[1].split("\n\n")[:2] and all("  [5 tokens, " in story for story in stories)
    assert re.search(f"\n{SUMMARY}\n", out)


def test_ctrl_c_ends_in_one_line(monkeypatch, capsys, checkpoint):
    llm = LLM(checkpoint)

    def stream(prompts: list[str], params: SamplingParams):
        yield next(LLM.stream(llm, prompts, params))
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    monkeypatch.setattr(llm, "stream", stream)
    monkeypatch.setattr(command, "LLM", lambda **options: llm)
    assert main(["--model", str(checkpoint), "the fox"]) == 130
    out, err = capsys.readouterr()
    assert out.startswith("the fox") and err == "interrupted\n"
