"""The stories that a reader sees first: a rule chooses their seed, and the commands tell them."""

import importlib
import json

import pytest

pytest.importorskip("torch")

import nanovllm
from models.training import seed
from nanovllm.__main__ import main as command
from stages import __main__ as stages
from stages import s1_contiguous_cache, s7_cpu_offload
from stages.bench import results, scoreboard
from tests.helpers import ROOT, find_stages

CHOSEN = json.loads(seed.FILE.read_text(encoding="utf-8"))


def first_story(engine, prompt: str) -> str:
    """Return what a command prints first: a story, and why it ended."""
    llm = engine.LLM(seed.FILE.parent, dtype="float32", device="cpu", kv_cache_tokens=2048, seed=CHOSEN["seed"])
    (output,) = llm.generate([prompt], engine.SamplingParams(**seed.SAMPLING))
    story = output.outputs[0]
    return f"{prompt}{story.text}  [{len(story.token_ids)} tokens, {story.finish_reason}]"


def test_seed_is_the_one_with_the_fewest_repeats():
    assert len(CHOSEN["repeats"]) == len(seed.SEEDS)
    assert CHOSEN["seed"] == CHOSEN["repeats"].index(min(CHOSEN["repeats"]))


@pytest.mark.full
def test_repeats_are_current():
    some = [0, CHOSEN["seed"]]
    counts = [seed.count_repeats(engine, some) for engine in (s7_cpu_offload, nanovllm)]
    assert [sum(each) for each in zip(*counts, strict=True)] == [CHOSEN["repeats"][i] for i in some]


@pytest.mark.parametrize("name", find_stages(ROOT))
def test_help_of_a_stage_has_the_defaults_of_its_command(name, capsys):
    module = importlib.import_module(f"{name}.__main__")
    assert seed.DEFAULT_PROMPTS == module.PROMPTS
    with pytest.raises(SystemExit):
        module.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    for option, default in {"seed": CHOSEN["seed"], **seed.SAMPLING}.items():
        flag = "--" + option.replace("_", "-")
        described = out.rpartition(f"{flag} {option.upper()} ")[2].split(" --")[0]
        assert f"(default: {default})" in described, flag


def test_commands_tell_the_story_of_the_chosen_seed(capsys):
    prompt = seed.ALONE
    assert stages.main(["1", prompt]) == 0
    story = capsys.readouterr().out.split("\n\n")[0]
    assert story == first_story(s1_contiguous_cache, prompt)
    shown = results.read()["run"]["screen"].splitlines()
    assert prompt == scoreboard.RUN_PROMPT and shown[1] == shown[5] == scoreboard.ends(story)

    assert command(["generate", prompt, "--device", "cpu", "--offload-policy", "load"]) == 0
    assert capsys.readouterr().out.split("\n\n")[0] == first_story(nanovllm, prompt)
