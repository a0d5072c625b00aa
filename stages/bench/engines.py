"""The stages by name, and one engine without a model that takes any of them.

    engine = without_model("s6", kv_cache_tokens=8192)       it schedules, finds blocks, takes them and gives them back
    engine = engine_class("s4")(by_sample, model=folder)     the class, for a notebook that overrides another build_*

What can be counted (steps, tokens, blocks, preemptions, hits) needs no model, and is the same on every machine.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

PACKAGES = {
    "s1": "s1_contiguous_cache",
    "s2": "s2_block_manager",
    "s3": "s3_paged_attention",
    "s4": "s4_continuous_batching",
    "s5": "s5_cow_sampling",
    "s6": "s6_prefix_caching",
    "s7": "s7_cpu_offload",
}
WITHOUT_SCHEDULER = ("s1", "s2", "s3")  # these have no LLMEngine: the LLM itself holds the parts
ONE_SEQUENCE_A_REQUEST = ("s1", "s2", "s3", "s4")  # later ones make one for each sample

Seq = Any  # a stage's Sequence
Script = Callable[[Seq], int]  # the token that comes next in a sequence


def stage(name: str) -> ModuleType:
    """The package of a stage, by its short name.

    >>> stage("s2").__name__
    'stages.s2_block_manager'
    """
    return import_module(f"stages.{PACKAGES[name]}")


def part(name: str, module: str) -> ModuleType:
    """A file of a stage: part("s2", "block_manager")."""
    return import_module(f"stages.{PACKAGES[name]}.{module}")


def engine_of(name: str, llm: Any) -> Any:
    """What holds the parts of an LLM of stage `name`: its LLMEngine, or before stage 4 the LLM itself."""
    return llm if name in WITHOUT_SCHEDULER else llm.llm_engine


def new_sequence(name: str, engine: Any, request_id: str, prompt: list[int], params: Any) -> Seq:
    """A sequence as `engine`'s own input processor makes it, of one sample. Nobody has scheduled it."""
    made = engine.input_processor.process(request_id, prompt, params)
    return made if name in ONE_SEQUENCE_A_REQUEST else made[0]


# ---- without a model


def same_token(seq: Seq) -> int:
    """Every sequence goes on with the same token."""
    return 3


def by_sample(seq: Seq) -> int:
    """Each sample of a prompt goes on with a token of its own. (From stage 5 on.)"""
    return 3 + seq.sample_index


class ScriptedRunner:
    """A model runner that computes nothing: the script says which token comes next."""

    def __init__(self, name: str, script: Script = same_token) -> None:
        self.num_steps = self.num_tokens = 0
        self._sampled, self._script = part(name, "sampling").SampledToken, script

    def run(self, batch: Sequence[tuple[Seq, int]]) -> list[Any]:
        """A SampledToken for each sequence that is then complete, None for the others."""
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + sum(count for _, count in batch)
        return [
            self._sampled(self._script(seq), 0.0) if seq.num_computed_tokens + count == seq.num_tokens else None
            for seq, count in batch
        ]


def engine_class(name: str) -> Any:
    """The LLMEngine of a stage from 4 on, with a scripted runner. Its other build_ methods can be overridden."""

    class EngineWithoutModel(stage(name).LLMEngine):  # type: ignore[misc]
        def __init__(self, script: Script = same_token, **options: Any) -> None:
            """`options` are EngineConfig's. Stage 7's policy is "load" unless they say "recompute"."""
            self._script = script
            if name == "s7":
                options = {"offload_policy": "load", **options}
                if options["offload_policy"] == "auto":
                    raise ValueError('"auto" measures how fast a model is, and there is none: "load" or "recompute"')
            super().__init__(stage(name).EngineConfig(**options))

        def build_tokenizer(self) -> None:
            return None

        def build_model(self) -> Any:
            return None

        def build_model_runner(self, model: Any) -> ScriptedRunner:
            return ScriptedRunner(name, self._script)

    return EngineWithoutModel


def without_model(name: str, script: Script = same_token, **options: Any) -> Any:
    """What holds the parts of stage `name`, with a scripted runner in the model's place: an LLMEngine, or before stage
    4 an LLM. `options` are EngineConfig's.
    """
    if name not in WITHOUT_SCHEDULER:
        return engine_class(name)(script, **options)
    llm = stage(name).LLM(**options)
    llm.model_runner = ScriptedRunner(name, script)
    return llm
