"""The workload, and its run on each stage: the same eight requests, step by step, with the same events every time.

From stage 4 on they arrive while others run, and the clock counts steps. Stages 1 to 3 serve static batches: they get
all requests at once, in order of arrival, and abort none. A stage without parallel sampling serves n = 3 as three
requests.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from nanovllm.trace import State, Tracer, apply, traced
from nanovllm.trace.events import Event, Sink
from nanovllm.trace.replay import begin
from stages.bench.engines import ONE_SEQUENCE_A_REQUEST, WITHOUT_SCHEDULER, stage

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 8, 40, 16
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 8, 24  # in a step; the tokens are limited from stage 4 on
TILE_SIZE = 64  # from stage 3 on: attention takes several tiles
MAX_STEPS = 150  # of any stage: a reader goes through all of them
WALL_CLOCK = ("seconds", "began")  # fields that differ from run to run
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
    after: int = 0  # the number of steps before it arrives
    stop: str | tuple[str, ...] = ()
    n: int = 1
    aborted_after: int | None = None
    num_tokens: int | None = None  # of the prompt: the rest is cut off
    follows: str | None = None  # a request whose prompt and output are this prompt

    def options(self, has_n: bool) -> dict[str, Any]:
        """Return the options of SamplingParams. Decoding is greedy, except for samples: they would all be the same."""
        options = {"max_tokens": self.max_tokens, "stop": self.stop, "ignore_eos": True, "temperature": 0.0}
        if self.n > 1:
            options |= {"temperature": 0.8, "seed": 7}
        return options | ({"n": self.n} if has_n else {})

    def prompt_for(self, llm: Any, texts: Mapping[str, list[int]]) -> str | list[int]:
        """Return the prompt, as token ids if it is cut or follows one of `texts`: all tokens of a request, by name."""
        if self.follows is not None:
            return texts.get(self.follows, [])[: self.num_tokens]
        if self.num_tokens is None:
            return self.prompt
        token_ids: list[int] = getattr(llm, "llm_engine", llm).tokenizer.encode(self.prompt)
        return token_ids[: self.num_tokens]


@dataclass(frozen=True)
class Workload:
    """Requests, and the pool that serves them."""

    requests: tuple[Request, ...]
    num_blocks: int = NUM_BLOCKS
    num_host_blocks: int = NUM_HOST_BLOCKS
    max_num_seqs: int = MAX_NUM_SEQS
    options: Mapping[str, Any] = field(default_factory=dict)  # more of the LLM's
    load_steps: int = 0  # how many steps a load takes, unless the engine waits for it; 0: on a CPU it takes none


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
THE_PAGES = Workload(WORKLOAD)


def label(seq: str) -> str:
    """Return the page's name for a sequence.

    >>> label("A"), label("F.0")
    ('A', 'F1')
    """
    request, _, sample = seq.partition(".")
    return f"{request}{int(sample) + 1}" if sample else request


# ---- serving the workload


def record(name: str) -> list[Event]:
    """Return the events of stage `name` ("s1"), beginning with the snapshot."""
    events: list[Event] = []
    serve(name, stage(name), events.append, Tracer())
    return tidy(events)


def serve(name: str, engine: ModuleType, write: Sink, tracer: Tracer, workload: Workload = THE_PAGES) -> None:
    """Serve a workload with `engine`, the package of stage `name` or an exercise on it, and trace it."""
    llm = build_llm(name, engine, tracer, workload)
    if workload.load_steps:
        slow_loads(llm.llm_engine.host_tier, tracer, workload.load_steps)
    with traced(llm, write, tracer):
        if name in WITHOUT_SCHEDULER:
            serve_batches(name, engine, llm, workload.requests)
        else:
            serve_continuously(name, engine, llm, workload.requests)


def tidy(events: Iterable[Event]) -> list[Event]:
    """Return the events without times, and those between two steps with the number of the step that follows."""
    return list(renumber({key: value for key, value in event.items() if key not in WALL_CLOCK} for event in events))


def renumber(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events. One between two steps, such as an arrival, gets the number of the step that follows.

    >>> [event["step"] for event in renumber([{"kind": "arrive", "step": 0}, {"kind": "step", "step": 1}])]
    [1, 1]
    """
    waiting: list[Event] = []
    for event in events:
        waiting.append(event)
        if event["kind"] in ("snapshot", "step"):
            yield from ({**each, "step": event["step"]} for each in waiting)
            waiting = []


def build_llm(name: str, engine: ModuleType, observer: Tracer, workload: Workload) -> Any:
    """Return the engine's LLM, with a pool that is too small for all requests at once."""
    options: dict[str, Any] = {
        "kv_cache_tokens": workload.num_blocks * BLOCK_SIZE,
        "max_num_seqs": workload.max_num_seqs,
        "max_model_len": 128,
        **workload.options,
    }
    if name == "s1":
        options |= {"reservation": "request"}
    else:
        options |= {"block_size": BLOCK_SIZE}
    if name not in ("s1", "s2"):
        options |= {"tile_size": TILE_SIZE}
    if name not in WITHOUT_SCHEDULER:
        options |= {"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    if name == "s7":
        options |= {"offload_policy": "load", "kv_offloading_tokens": workload.num_host_blocks * BLOCK_SIZE}
    return engine.LLM(ROOT / "models" / "storyteller", observer, device="cpu", dtype="float32", **options)


class Transfer:
    """The event of a load that takes some steps. It has arrived then, or once the engine has waited for it."""

    def __init__(self, tracer: Tracer, num_steps: int) -> None:
        self._tracer, self._until = tracer, tracer.step + num_steps

    def query(self) -> bool:
        return self._tracer.step >= self._until

    def synchronize(self) -> None:
        self._until = 0


def slow_loads(tier: Any, tracer: Tracer, num_steps: int) -> None:
    """Let each load of a HostTier take that many steps, as on a GPU. On a CPU it has arrived when load() returns."""
    load = tier.load

    def load_slowly(copies: list[Any]) -> None:
        num_loads = len(tier.loads)
        load(copies)
        for each in tier.loads[num_loads:] if copies else ():
            each.event = Transfer(tracer, num_steps)

    tier.load = load_slowly


def arrivals(name: str, engine: ModuleType, requests: Iterable[Request]) -> Iterator[tuple[str, Request, Any]]:
    """Yield (request_id, request, SamplingParams), in order of arrival."""
    has_n = name not in ONE_SEQUENCE_A_REQUEST
    for request in sorted(requests, key=lambda request: request.after):
        options = request.options(has_n)
        if has_n or request.n == 1:
            yield request.name, request, engine.SamplingParams(**options)
        else:  # each sample is a request of its own, with its own seed
            for i in range(request.n):
                params = engine.SamplingParams(**options | {"seed": options["seed"] + i})
                yield f"{request.name}.{i}", request, params


def serve_continuously(name: str, engine: ModuleType, llm: Any, requests: Collection[Request]) -> None:
    """Add each request when it arrives, abort those that leave, and step until all have finished."""
    coming, num_steps, texts = deque(arrivals(name, engine, requests)), 0, dict[str, list[int]]()
    leaving = {request.name: request.aborted_after for request in requests if request.aborted_after is not None}
    while coming or llm.llm_engine.has_unfinished_requests():
        while coming and coming[0][1].after <= num_steps:
            request_id, request, params = coming.popleft()
            llm.llm_engine.add_request(request_id, request.prompt_for(llm, texts), params)
        for request_id in [request_id for request_id, after in leaving.items() if after == num_steps]:
            llm.llm_engine.abort_request(request_id)
        for output in llm.llm_engine.step():
            texts[output.request_id] = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        num_steps += 1


def serve_batches(name: str, engine: ModuleType, llm: Any, requests: Collection[Request]) -> None:
    """Serve all requests with an LLM of stages 1 to 3, under the names of the workload."""
    request_ids, in_order, params = zip(*arrivals(name, engine, requests), strict=True)
    llm.input_processor = NamingInputProcessor(llm.input_processor, request_ids)
    for _ in llm.stream([request.prompt_for(llm, {}) for request in in_order], list(params)):
        pass


class NamingInputProcessor:
    """An input processor that replaces the LLM's request numbers by names."""

    def __init__(self, input_processor: Any, names: Iterable[str]) -> None:
        self._input_processor, self._names = input_processor, iter(names)

    def process(self, request_id: str, prompt: str, params: Any) -> Any:
        return self._input_processor.process(next(self._names), prompt, params)


# ---- the recorded run, step by step


@dataclass(frozen=True)
class Step:
    """The events of a step, and the states around it."""

    number: int
    events: list[Event]
    before: State
    after: State

    def of(self, kind: str, **fields: Any) -> list[Event]:
        """Return the events of a kind that have these values."""
        return [e for e in self.events if e["kind"] == kind and all(e[key] == fields[key] for key in fields)]


class Run:
    """A recorded run. Iterate over `run.steps` to see it step by step."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    @cached_property
    def steps(self) -> list[Step]:
        return list(self._steps())

    def _steps(self) -> Iterator[Step]:
        snapshot, *rest = self.events
        state, events = begin(snapshot), list[Event]()
        before = deepcopy(state)
        for event in rest:
            apply(state, event)
            events.append(event)
            if event["kind"] == "step":
                after = deepcopy(state)
                yield Step(event["step"], events, before, after)
                before, events = after, []
