"""The stages by name, and an engine without a model for each of them.

    engine = without_model("s6", model=folder, kv_cache_tokens=8192)    it schedules, takes blocks and frees them

Everything that can be counted (steps, tokens, blocks, preemptions, hits) needs no model, and is the same everywhere.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDERS = sorted(path.parent.name for path in Path(__file__).resolve().parents[1].glob("s[0-9]_*/__init__.py"))
PACKAGES = {folder.split("_")[0]: folder for folder in FOLDERS}  # by short name: "s1", "s2"
WITHOUT_SCHEDULER = ("s1", "s2", "s3")  # the LLM itself holds the parts: there is no LLMEngine
ONE_SEQUENCE_A_REQUEST = ("s1", "s2", "s3", "s4")  # later stages make one per sample

Seq = Any  # a stage's Sequence
Script = Callable[[Seq], int]  # returns the next token of a sequence


def stage(name: str) -> ModuleType:
    """Return the package of a stage, by its short name, or of a branch.

    >>> stage("s2").__name__, stage("more_speculation").__name__
    ('stages.s2_block_manager', 'stages.more_speculation')
    """
    return import_module(f"stages.{PACKAGES.get(name, name)}")


def part(name: str, module: str) -> ModuleType:
    """Return a module of a stage or a branch, such as "block_manager" of "s2"."""
    return import_module(f"{stage(name).__name__}.{module}")


def silent(name: str) -> Any:
    """Return an observer of stage `name` that ignores everything, for managers without an engine."""
    return part(name, "observer").Observer()


def new_sequence(name: str, inputs: Any, request_id: str, prompt: list[int], params: Any) -> Seq:
    """Return a sequence of one sample. `inputs` is an InputProcessor of stage `name`."""
    made = inputs.process(request_id, prompt, params)
    return made if name in ONE_SEQUENCE_A_REQUEST else made[0]


# ---- without a model


def same_token(seq: Seq) -> int:
    """Continue every sequence with the same token."""
    return 3


def by_sample(seq: Seq) -> int:
    """Continue each sample of a prompt with a token of its own. Stages 5 to 7 have samples."""
    return 3 + int(seq.sample_index)


class ScriptedRunner:
    """A model runner that computes nothing: a script chooses the tokens."""

    def __init__(self, name: str, script: Script = same_token) -> None:
        self.num_steps = self.num_tokens = 0
        self._sampled, self._script = part(name, "sampling").SampledToken, script

    def run(self, batch: Sequence[tuple[Seq, int]]) -> list[Any]:
        """Return a SampledToken for each sequence that is then complete, None for the others."""
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + sum(count for _, count in batch)
        return [
            self._sampled(self._script(seq), 0.0) if seq.num_computed_tokens + count == seq.num_tokens else None
            for seq, count in batch
        ]


def without_model(name: str, script: Script = same_token, observer: Any = None, **options: Any) -> Any:
    """Return an engine of stage `name` with a scripted runner: an LLMEngine, or an LLM before stage 4.

    `options` are EngineConfig's. The default policy of stage 7 is "load" here, because nothing is timed.
    """
    if name == "s7":
        options = {"offload_policy": "load", **options}
    engine = stage(name).LLM(observer=observer, **options)
    if name not in WITHOUT_SCHEDULER:
        engine = engine.llm_engine
    engine.model_runner = ScriptedRunner(name, script)
    inputs = part(name, "input_processor").InputProcessor  # one without a tokenizer: these texts are never read
    engine.input_processor = inputs(engine.model_config, None, engine.max_model_len, engine.config.seed)
    return engine
