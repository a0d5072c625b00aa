"""nanovllm generate: stories, a summary of the memory, and one line for each error."""

import io
import re
import signal
from pathlib import Path

import pytest

from ... import LLM, LLMEngine, SamplingParams
from ...cli.generate import DEFAULT_PROMPTS, print_stories
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import OPTIONS, UNMEASURED
from ..testing.processes import Terminal, start

SUMMARY = (
    r"\d+ tokens/s, first token \d+ ms, KV slots: (?P<held>[\d,]+) of (?P<all>[\d,]+) reserved, "
    r"(?P<used>[\d,]+) used \((?P<share>\d+)%\) \|(?P<strip>[#\-.]+)\|, "
    r"preemptions: \d+.*"
)
SIX = ("--max-tokens", "6", "--ignore-eos")


def test_stories_are_followed_by_a_summary(run):
    status, out, err = run("generate", "the fox", "the wood", "--temperature", "0", *SIX)
    first, second, last = out.split("\n\n")
    assert status == 0 and err == ""
    for story, prompt in ((first, "the fox"), (second, "the wood")):
        assert story.startswith(prompt) and story.endswith("  [6 tokens, length]")
    kernels, summary = last.strip().split("\n")
    assert kernels.startswith("plain operations") and re.fullmatch(SUMMARY, summary)


def test_summary_counts_slots_reserved_and_used(run):
    """At the peak, each of two requests has its 2 prompt tokens and 5 of its 6 others: 7 slots in 2 blocks."""
    _, out, _ = run("generate", "the", "the", "--kv-cache-tokens", "64", "--block-size", "4", *SIX)
    summary = re.fullmatch(SUMMARY, out.splitlines()[-1])
    assert summary, out
    assert (summary["held"], summary["all"], summary["used"]) == ("16", "64", "14")
    assert summary["share"] == "88" and summary["strip"] == "#" * 8 + "." * 24


def test_summary_counts_preemptions(run):
    """Both stories start with two of the four blocks, and each needs all four: one is preempted."""
    sizes = ("--block-size", "4", "--kv-cache-tokens", "16", "--max-model-len", "16")
    for prompts, num_preemptions in ((["the fox"], 0), (["the fox", "the wood"], 1)):
        _, out, _ = run("generate", *prompts, "--max-tokens", "10", "--ignore-eos", *sizes)
        assert f"|, preemptions: {num_preemptions}, " in out


def test_summary_counts_blocks_copied(run):
    """All samples share the first block of a prompt of 6 tokens, and all but the last copy the second."""
    for num_samples, counts in ((1, "blocks copied: 0, "), (3, "blocks copied: 2, ")):
        _, out, _ = run("generate", "the fox the fox the", "--n", str(num_samples), "--block-size", "4", *SIX)
        assert counts in out.splitlines()[-1]


def test_summary_counts_tokens_cached(run):
    """One seat: the second of two prompts of 6 tokens starts when the first has finished, and hits its first block."""
    prompt, sizes = "the fox the fox the", ("--max-num-seqs", "1", "--block-size", "4")
    for flags, counts in (((), "tokens cached: 4 of 12"), (("--no-enable-prefix-caching",), "tokens cached: 0 of 12")):
        _, out, _ = run("generate", prompt, prompt, *flags, *sizes, *SIX)
        assert counts in out.splitlines()[-1]


def test_summary_counts_blocks_stored_and_loaded(run):
    """One seat: the second story takes all blocks, and the third starts with the blocks of the first one."""
    prompt = "the fox the fox the fox the fox"
    sizes = ("--max-num-seqs", "1", "--kv-cache-tokens", "40", "--max-model-len", "39", "--block-size", "8")
    _, out, _ = run("generate", prompt, "wood " * 10, prompt, "--offload-policy", "load", *sizes, *SIX)
    stored, loaded = re.search(r"stored: (\d+), loaded: (\d+)$", out.splitlines()[-1]).groups()
    assert int(stored) >= int(loaded) > 0


def test_first_story_is_printed_as_it_is_generated(checkpoint, capsys):
    def watched():
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        for output in LLM(checkpoint, **OPTIONS).stream(["the", "fox"], params):
            yield output
            on_screen.append(capsys.readouterr().out)

    on_screen: list[str] = []
    outputs = print_stories(watched())
    assert on_screen[0].startswith("the"), "after the first token"
    assert on_screen[1] == "", "the second story waits"
    assert "fox" in on_screen[-2] + on_screen[-1]
    assert [output.prompt for output in outputs] == ["the", "fox"]


@pytest.mark.parametrize("lengths", [(5, 3, 1), (1, 5, 3), (3, 1, 5)], ids=str)
def test_stories_are_printed_in_order_whichever_finishes_first(checkpoint, capsys, lengths):
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    print_stories(LLM(checkpoint, **OPTIONS).stream(["the", "fox", "wood"], params))
    assert [int(length) for length in re.findall(r"\[(\d) tokens, length]", capsys.readouterr().out)] == [*lengths]


def test_speeds_of_loading_and_computing_are_printed_last(run):
    _, out, _ = run("generate", "the", "--offload-policy", "auto")
    *_, summary, speeds = out.splitlines()
    assert re.fullmatch(SUMMARY, summary)
    assert re.fullmatch(r"load or recompute: loads \d+\.\d GB/s, stores \d+\.\d GB/s, prefill [\d,]+ tokens/s", speeds)


def test_six_built_in_prompts_are_the_default(run):
    status, out, _ = run("generate", *SIX)
    assert status == 0 and len(DEFAULT_PROMPTS) == 6
    assert [out.index(prompt) for prompt in DEFAULT_PROMPTS] == sorted(out.index(prompt) for prompt in DEFAULT_PROMPTS)


def test_all_samples_of_a_prompt_are_printed(run):
    _, out, _ = run("generate", "the fox", "the wood", "--n", "3", "--temperature", "1", *SIX)
    assert out.count("[6 tokens, length]") == 6 and out.count("the fox") == out.count("the wood") == 3


def test_prompt_from_standard_input(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the fox\nand\n"))
    _, out, _ = run("generate", "the wood", "-", *SIX)
    assert out.index("the wood") < out.index("the fox\nand") and "the fox\nand\n  [" not in out


def test_prompts_from_files(run, tmp_path):
    (tmp_path / "a.txt").write_text("the fox\nand\n")
    _, out, _ = run("generate", "the wood", "--file", str(tmp_path / "a.txt"), *SIX)
    assert out.index("the wood") < out.index("the fox\nand") and "the fox\nand\n  [" not in out


def test_prompt_after_a_double_dash_may_begin_with_a_dash(run):
    _, out, _ = run("generate", *SIX, "--", "-1 fox", "--help")
    assert out.startswith("-1 fox") and "\n--help" in out


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("no/such/file", "[Errno 2] No such file or directory: 'no/such/file'"),
        (".", "[Errno 21] Is a directory: '.'"),
        ("/dev/zero", "/dev/zero has more than 16,777,216 characters: too long for a prompt"),
        ("binary", "binary is not utf-8 text: invalid byte 0xff"),
    ],
)
def test_unreadable_prompt_file_is_a_one_line_error(run, monkeypatch, tmp_path, file, message):
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"a\xff\xfe")
    assert run("generate", "--file", file) == (2, "", f"error: {message}\n")


def test_checkpoint_among_the_prompts_is_an_error_that_names_model(run, tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    for path in ("m", "a.gguf"):
        status, out, err = run("generate", "the fox", path, *SIX)
        assert (status, out) == (2, "") and f"--model {path}" in err and err.count("\n") == 1
        assert run("generate", "the fox", *SIX, "--", path)[0] == 0
    assert run("generate", "none", *SIX)[0] == 0, "a folder that is no checkpoint"


def test_sizes_may_have_units(run):
    for flag in ("--kv-cache-memory-bytes", "--kv-cache-tokens"):
        status, _, err = run("generate", "the", flag, "64KiB", "--max-tokens", "1", "--kv-disk-size", "2GiB")
        assert (status, err) == (0, "")
    status, _, err = run("generate", "the " * 51, "--max-model-len", "0.05k")
    assert status == 1 and " 50" in err
    status, _, err = run("generate", "the", "--max-model-len", "1x")
    assert status == 2 and "'--max-model-len': '1x' is not a size such as 4096, 4k" in err and err.count("\n") == 1


def test_stats_are_printed_to_standard_error(run):
    _, out, err = run("generate", "the fox", "--stats", "1e-9", *SIX)
    assert out.startswith("the fox") and "running 1 (" in err
    assert all(line.startswith("running ") for line in err.splitlines()) and len(err.splitlines()) >= 6


def test_stats_do_not_break_into_a_story_in_the_same_terminal(run, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    assert run("generate", "the fox", "the wood", "--stats", "1e-9", *SIX)[0] == 0
    stats = [line for line in terminal.getvalue().splitlines() if "running " in line]
    assert len(stats) >= 6 and all(line.startswith("running ") for line in stats)
    assert terminal.getvalue().count("[6 tokens, length]") == 2


def test_stories_depend_only_on_the_seed(run):
    def stories(seed: str) -> str:
        return run("generate", "the", "--seed", seed, "--temperature", "1")[1].rsplit("\n", 2)[0]

    assert stories("1") == stories("1") != stories("2")


def test_equal_prompts_get_different_stories(run):
    _, out, _ = run("generate", "the", "the", "--temperature", "1", "--max-tokens", "20")
    first, second = out.split("\n\n\n")[0].rsplit("]\n\n", 1)
    assert first.rsplit("[")[0] != second.rsplit("[")[0]


def test_stop_string_ends_a_story(run):
    _, out, _ = run("generate", "the", "--temperature", "0", *SIX)
    story = out.split("  [")[0].removeprefix("the")
    _, out, _ = run("generate", "the", "--temperature", "0", *SIX, "--stop", "no such text", "--stop", story[2:4])
    assert out.startswith(f"the{story[:2]}  [") and ", stop]" in out


def test_default_pool_has_room_for_the_longest_sequence(run, tmp_path):
    folder = write_checkpoint(tmp_path, max_position_embeddings=5000)
    for longest, message in ((None, "16 of 2,048"), ("100", "16 of 2,048"), ("4001", "16 of 8,000")):
        options = ["--max-model-len", longest] if longest else []
        status, out, _ = run("generate", "the", *options, *SIX, model=folder)
        assert status == 0 and f"{message} reserved" in out


# Errors


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["--model", __file__], f"{__file__} is a file, not a checkpoint folder"),
        (["--kv-cache-tokens", "0"], "kv_cache_tokens must be at least 1 and below 2**63, got 0"),
        (["--kv-cache-tokens", "9", "--kv-cache-memory-bytes", "9000"], "set the size of the KV cache only once"),
        (["--max-model-len", "65"], "max_model_len is 65, but the model has 64 positions"),
        (["--device", "warp"], "device 'warp' is not available"),
        (["--temperature", "-1"], "temperature must be"),
        (["--stop", ""], "stop must be"),
    ],
    ids=" ".join,
)
def test_invalid_option_is_a_one_line_error_with_status_2(run, arguments, error):
    status, out, err = run("generate", "the", *arguments)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and error in err and err.count("\n") == 1


def test_folder_without_a_checkpoint_is_named(run, tmp_path):
    assert run("generate", model=tmp_path)[2].startswith(f"error: {tmp_path} is not a checkpoint folder: ")


def test_prompt_that_cannot_be_served_does_not_stop_the_others(run):
    status, out, err = run("generate", "a" * 100, "the fox", "the wood", *SIX)
    assert status == 1
    assert err.startswith("error: ") and "64" in err and "101" in err and err.count("\n") == 1
    assert out.index("[0 tokens, error]") < out.index("the fox") < out.index("the wood")
    assert re.fullmatch(SUMMARY, out.splitlines()[-1])


def test_prompt_that_is_not_utf_8_does_not_stop_the_others(run):
    status, out, err = run("generate", "fo\udcffx", "the fox", *SIX)
    assert status == 1 and re.fullmatch(r"error: the prompt .*\\udcff.*\n", err)
    assert "the fox" in out


def test_summary_without_a_served_prompt(run):
    status, out, err = run("generate", "", "--kv-cache-tokens", "64")
    assert status == 1 and "the prompt is empty" in err and out.endswith("nothing was served\n")


# Interruptions


@pytest.mark.full
def test_full_disk_is_a_one_line_error(checkpoint):
    with open("/dev/full", "w") as full:
        process = start("generate", "the", "--model", str(checkpoint), *UNMEASURED, stdout=full)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "error: [Errno 28] No space left on device\n")


def endless(folder):
    """Return options of a story that takes minutes, and its model."""
    model = write_checkpoint(folder, max_position_embeddings=10**6)
    lasts = ["--max-tokens", "100000", "--ignore-eos", "--max-model-len", "100001", *UNMEASURED]
    return ["generate", "the fox", "--model", str(model), *lasts]


def test_ctrl_c_is_one_line(run, monkeypatch):
    step, calls = LLMEngine.step, iter(range(1, 100))

    def interrupted(engine):
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    status, out, err = run("generate", "the fox", *SIX)
    assert (status, err) == (130, "interrupted\n") and out.startswith("the fox") and "tokens/s" not in out


@pytest.mark.full
def test_ctrl_c_ends_the_process_in_one_line(tmp_path):
    process = start(*endless(tmp_path))
    assert process.stdout.read(7) == "the fox"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.full
def test_closed_pipe_ends_the_command_without_a_traceback(tmp_path):
    process = start(*endless(tmp_path))
    assert process.stdout.read(7) == "the fox"
    process.stdout.close()
    assert process.wait(timeout=60) == 141 and process.stderr.read() == ""
    process.stderr.close()


def test_endless_standard_input_is_a_one_line_error(run, monkeypatch):
    with open("/dev/zero") as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        message = "error: standard input has more than 16,777,216 characters: too long for a prompt\n"
        assert run("generate", "-") == (2, "", message)


@pytest.mark.full
@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "the f?x ?"), ("latin-1", "the f\xf6x ?")])
def test_unprintable_characters_appear_as_question_marks(checkpoint, encoding, shown):
    process = start(
        *("generate", "the föx →", "--model", str(checkpoint), *UNMEASURED, *SIX),
        env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        encoding="latin-1",
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and out.startswith(shown)
