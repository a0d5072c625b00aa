"""The workload: the same eight requests, which arrive while others run, served by any stage.

A step counts as one on the clock. A stage that has no samples serves a request with n = 3 as three; stages 1 to 3 serve
static batches and cannot abort.
"""

from collections import deque
from collections.abc import Iterator
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
        """SamplingParams': greedy, but for samples, which would all be the same."""
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


def build(name: str) -> Any:
    """The LLM of a stage, with a pool in which these requests meet."""
    options: dict[str, Any] = {"kv_cache_tokens": NUM_BLOCKS * BLOCK_SIZE, "max_num_seqs": 8, "max_model_len": 128}
    if name == "s1":
        options |= {"reservation": "request"}
    else:
        options |= {"block_size": BLOCK_SIZE}
    if name not in WITHOUT_SCHEDULER:
        options |= {"max_num_batched_tokens": 24}
    if name == "s7":
        options |= {"offload_policy": "load", "kv_offloading_tokens": NUM_HOST_BLOCKS * BLOCK_SIZE}
    return stage(name).LLM(ROOT / "models" / "storyteller", device="cpu", dtype="float32", **options)


def serve(name: str, llm: Any, observer: Any = None, workload: tuple[Request, ...] = WORKLOAD) -> None:
    """Serve them all to the end, one step after the other."""
    if name in WITHOUT_SCHEDULER:
        serve_batches(name, llm, observer, workload)
    else:
        serve_continuously(name, llm, workload)


def requests(name: str, workload: tuple[Request, ...]) -> Iterator[tuple[str, Request, Any]]:
    """(request_id, request, SamplingParams), in order of arrival."""
    has_n = name not in ONE_SEQUENCE_A_REQUEST
    for request in sorted(workload, key=lambda request: request.after):
        params = stage(name).SamplingParams(**request.options(has_n))
        if has_n or request.n == 1:
            yield request.name, request, params
        else:
            for index in range(request.n):
                yield f"{request.name}.{index}", request, sampled_as(name, request, index)


def sampled_as(name: str, request: Request, index: int) -> Any:
    """Without n each sample is a request of its own, with a seed of its own."""
    options = request.options(has_n=False)
    return stage(name).SamplingParams(**options | {"seed": options["seed"] + index})


def serve_continuously(name: str, llm: Any, workload: tuple[Request, ...]) -> None:
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


def serve_batches(name: str, llm: Any, observer: Any, workload: tuple[Request, ...]) -> None:
    """As LLM.generate() does, but for requests that join the queue while a batch runs."""
    everyone = list(requests(name, workload))
    llm._request_ids = iter([request_id for request_id, _, _ in everyone])
    coming, waiting, running = deque(everyone), deque[Any](), list[Any]()
    num_steps = 0
    while coming or waiting or running:
        while coming and coming[0][1].after <= num_steps:
            _, request, params = coming.popleft()
            waiting.append(llm._add_request(request.prompt, params))
            if observer:
                observer.join(waiting[-1])
        running = running or llm._admit(waiting)
        llm._step(running)
        running = [seq for seq in running if not seq.finished]
        num_steps += 1
