"""The workload: the same eight requests, served by any stage.

From stage 4 on they arrive while others run; a step counts as one on the clock. Stages 1 to 3 serve static batches:
they get all requests at once, in order of arrival, and abort none. A stage without samples serves n = 3 as three
requests.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.bench.engines import ONE_SEQUENCE_A_REQUEST, WITHOUT_SCHEDULER, stage

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 8, 40, 16
MAX_STEPS = 150  # of any stage: a reader goes through all of them
KING = (
    "Once upon a time there was a King who had three daughters. "
    "The youngest was so beautiful that the sun itself was surprised."
)

ANIMALS = "Long ago, when all the animals could talk, there lived in a wood a bear and a wolf, and"


@dataclass(frozen=True)
class Request:
    name: str
    prompt: str
    max_tokens: int
    after: int = 0  # it arrives when this many steps are done
    stop: str | tuple[str, ...] = ()
    n: int = 1
    aborted_after: int | None = None

    def options(self, has_n: bool) -> dict[str, Any]:
        """Return the options of SamplingParams: greedy, except for samples, which would all be the same."""
        options = {"max_tokens": self.max_tokens, "stop": self.stop, "ignore_eos": True, "temperature": 0.0}
        if self.n > 1:
            options |= {"temperature": 0.8, "seed": 7}
        return options | ({"n": self.n} if has_n else {})


WORKLOAD = (
    Request("A", KING + " One day", 18),
    Request("B", "Reddy Fox was very hungry.", 30, stop="."),
    Request("C", "One day Dorothy and the Scarecrow walked along the road of yellow brick until they came to", 56),
    Request("D", '"Come in," said the old woman.', 32),
    Request("E", "The little mermaid swam up to the ship and looked in at the window, and there she saw", 54),
    Request("F", ANIMALS, 40, after=4, n=3),
    Request("G", KING + " One night there came a knock at the door,", 40, after=10),
    Request("H", "Little Raggedy Ann looked out of the window. It was snowing, and", 44, after=16, aborted_after=60),
)


def build(name: str, observer: Any = None) -> Any:
    """Return the LLM of a stage, with a pool in which these requests meet."""
    options: dict[str, Any] = {"kv_cache_tokens": NUM_BLOCKS * BLOCK_SIZE, "max_num_seqs": 8, "max_model_len": 128}
    if name == "s1":
        options |= {"reservation": "request"}
    else:
        options |= {"block_size": BLOCK_SIZE}
    if name not in WITHOUT_SCHEDULER:
        options |= {"max_num_batched_tokens": 24}
    if name == "s7":
        options |= {"offload_policy": "load", "kv_offloading_tokens": NUM_HOST_BLOCKS * BLOCK_SIZE}
    return stage(name).LLM(ROOT / "models" / "storyteller", observer, device="cpu", dtype="float32", **options)


def serve(name: str, llm: Any, workload: tuple[Request, ...] = WORKLOAD) -> None:
    """Serve all requests to the end."""
    if name in WITHOUT_SCHEDULER:
        serve_batches(name, llm, workload)
    else:
        serve_continuously(name, llm, workload)


def requests(name: str, workload: tuple[Request, ...]) -> Iterator[tuple[str, Request, Any]]:
    """Yield (request_id, request, SamplingParams), in order of arrival."""
    has_n = name not in ONE_SEQUENCE_A_REQUEST
    for request in sorted(workload, key=lambda request: request.after):
        params = stage(name).SamplingParams(**request.options(has_n))
        if has_n or request.n == 1:
            yield request.name, request, params
        else:
            for index in range(request.n):
                yield f"{request.name}.{index}", request, sampled_as(name, request, index)


def sampled_as(name: str, request: Request, index: int) -> Any:
    """Return the SamplingParams of a sample that is a request of its own, with a seed of its own."""
    options = request.options(has_n=False)
    return stage(name).SamplingParams(**options | {"seed": options["seed"] + index})


def serve_continuously(name: str, llm: Any, workload: tuple[Request, ...]) -> None:
    """Add each request when it arrives, abort those that leave, and step until all have finished."""
    engine, coming, num_steps = llm.llm_engine, deque(requests(name, workload)), 0
    leaving = {request.name: request.aborted_after for request in workload if request.aborted_after is not None}
    while coming or engine.has_unfinished_requests():
        while coming and coming[0][1].after <= num_steps:
            request_id, request, params = coming.popleft()
            engine.add_request(request_id, request.prompt, params)
        for request_id in [request_id for request_id, after in leaving.items() if after == num_steps]:
            engine.abort_request(request_id)
        engine.step()
        num_steps += 1


def serve_batches(name: str, llm: Any, workload: tuple[Request, ...]) -> None:
    """Hand all requests to an LLM of stages 1 to 3, under the names of the workload."""
    request_ids, asked, params = zip(*requests(name, workload), strict=True)
    llm.input_processor = Named(llm.input_processor, request_ids)
    for _ in llm.stream([request.prompt for request in asked], list(params)):
        pass


class Named:
    """An input processor that gives requests names in place of the LLM's numbers."""

    def __init__(self, input_processor: Any, names: Iterable[str]) -> None:
        self._input_processor, self._names = input_processor, iter(names)

    def process(self, request_id: str, prompt: str, params: Any) -> Any:
        return self._input_processor.process(next(self._names), prompt, params)
