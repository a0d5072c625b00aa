"""Stage 6: tokens of a prompt that are computed again, the cost of one changed word, and hits. All of it is counted."""

from pathlib import Path
from typing import Any

from nanovllm.bench.harness import Scores
from nanovllm.bench.workload import Task
from stages.bench.engines import by_sample, without_model
from stages.bench.predict import s5
from stages.bench.racing import sampling_params, serve
from stages.bench.workloads import even_prompt

LENGTH, SHORT = 512, 200  # tokens of a prompt
CHANGES = {"first": 0, "middle": LENGTH // 2, "last": LENGTH - 1}  # which token of the prompt differs


def measure(model: Path) -> Scores:
    """Return all counts."""
    first = even_prompt(LENGTH)
    changed = {name: [*first[:place], 2000, *first[place + 1 :]] for name, place in CHANGES.items()}
    engines = {name: engine_after(model, Task(first, 1), Task(prompt, 1)) for name, prompt in changed.items()}
    return {
        "repeated": {str(length): computed_again(model, even_prompt(length)) for length in (LENGTH, LENGTH + 1)},
        "changed": {name: each.kv_cache_manager.prefix_cache_stats.hits / LENGTH for name, each in engines.items()},
        "twice": {
            "at_once": two_requests(model, 0),
            "a_step_later": two_requests(model, 1),
            "samples": engine_after(model, Task(even_prompt(SHORT), 1, n=2)).model_runner.num_tokens,
        },
        "preempted": {name: s5.one_is_preempted(model, name) for name in ("s5", "s6")},
    }


def engine_after(model: Path, *tasks: Task) -> Any:
    """Return an engine that has served the tasks one after the other."""
    engine = without_model("s6", by_sample, model=str(model), kv_cache_tokens=8192)
    for number, task in enumerate(tasks):
        serve("s6", engine, [task], f"{number}: ")
    return engine


def computed_again(model: Path, prompt: list[int]) -> int:
    """Return the tokens that go through the model for a prompt that was served before."""
    return int(engine_after(model, Task(prompt, 1), Task(prompt, 1)).model_runner.num_tokens - len(prompt))


def two_requests(model: Path, steps_between: int) -> int:
    """Return the prompt tokens that are computed for two requests with the same prompt."""
    engine, task = engine_after(model), Task(even_prompt(SHORT), 8)
    engine.add_request("first", task.prompt, sampling_params("s6", task))
    for _ in range(steps_between):
        engine.step()
    serve("s6", engine, [task], "second")
    return int(engine.model_runner.num_tokens - 2 * (task.num_output_tokens - 1))
