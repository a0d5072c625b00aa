"""Batches on Ray Data: actors hold engines, and Ray moves rows to them and replaces an actor that dies.

    requests --> [rows][rows][rows] ...  --> actor 1: an engine  --> results, in the order in which batches finish
                                         --> actor 2: an engine

If an actor dies, Ray starts another actor and gives it the same batch, so no result is missing or repeated.
"""

import logging
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import pyarrow
import ray
import ray.data
from ray.exceptions import RayError

from ..llm import LLM
from ..requests.sampling_params import SamplingParams

__all__ = ["BatchLLM", "Cluster", "RayError", "WorkerError"]

Item = TypeVar("Item")
Result = TypeVar("Result")
Worker = Callable[[Sequence[Item]], Iterable[Result]]
Columns = dict[str, Any]  # a batch: an array or a list for each column


class BatchLLM:
    """An engine for Ray Data: it generates a text for each row of a batch.

        ray.data.read_json("prompts.jsonl").map_batches(
            BatchLLM, fn_constructor_kwargs={"model": "models/storyteller"}, batch_size=64, concurrency=2
        )

    The new columns are text, token_ids, finish_reason and error, as in the RequestOutput of each row.
    """

    def __init__(
        self,
        model: str | Path,
        sampling_params: SamplingParams | None = None,
        prompt_column: str = "prompt",
        **options: Any,
    ) -> None:
        """Build the engine. `options` are passed to LLM. Raise ValueError for an invalid option or checkpoint."""
        if sampling_params is not None and sampling_params.n != 1:
            raise ValueError(f"sampling_params.n must be 1, since a row has one output, got {sampling_params.n}")
        self._llm = LLM(model, **options)
        self._params, self._prompt_column = sampling_params, prompt_column

    def __call__(self, batch: Columns) -> Columns:
        """Return the batch with its new columns. A prompt is a text or token ids.

        A row that cannot be served gets an empty text, and `error` says why. Raise ValueError for an invalid prompt.
        """
        if self._prompt_column not in batch:
            raise ValueError(f"the batch must have the column {self._prompt_column!r}, got {', '.join(batch)}")
        prompts = [each if isinstance(each, str) else list(each) for each in batch[self._prompt_column]]
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        samples = [output.outputs[0] for output in outputs]
        return batch | {
            "text": [sample.text for sample in samples],
            "token_ids": [sample.token_ids for sample in samples],
            "finish_reason": [sample.finish_reason for sample in samples],
            "error": [output.error for output in outputs],
        }


class WorkerError(RuntimeError):
    """An error from building or calling a worker."""


class Actor(Generic[Item, Result]):
    """A Ray actor that holds a worker. Rows hold items and results in pickled form, so both may be any objects."""

    def __init__(self, build: Callable[[], Worker[Item, Result]]) -> None:
        self._build = build
        self._worker: Worker[Item, Result] | None = None

    def __call__(self, batch: Columns) -> Columns:
        """Return a row for each result, or one row with a WorkerError. Ray would log pages if the error were raised."""
        try:
            self._worker = self._worker or self._build()
            results = [pickle.dumps(each) for each in self._worker([pickle.loads(item) for item in batch["item"]])]
        except Exception as error:
            results = [pickle.dumps(WorkerError(f"{type(error).__name__}: {error}"))]
        return {"result": results}


class Cluster:
    """A connection to the Ray cluster at RAY_ADDRESS, or to a new one on this machine."""

    def __init__(self, num_engines: int | None, device: str | None) -> None:
        """Connect. The default is one engine per GPU. Without GPUs, or if `device` is "cpu", it is one per machine.

        Raise ValueError if the cluster has too few GPUs or cores for `num_engines`.
        """
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        num_gpus = 0 if device == "cpu" else int(sum(node.get("GPU", 0) for node in nodes))
        num_cores = int(min(node["CPU"] for node in nodes))  # of the machine that has the fewest
        limit, unit = (num_gpus, "GPUs") if num_gpus else (num_cores * len(nodes), "cores")
        self.num_engines = num_engines or num_gpus or len(nodes)
        if self.num_engines > limit:
            raise ValueError(f"data_parallel_size must be at most {limit}, the cluster's {unit}, got {num_engines}")
        num_cpus = max(1, num_cores // math.ceil(self.num_engines / len(nodes)))
        self._resources = {"num_cpus": num_cpus, "num_gpus": 1 if num_gpus else 0}

    def map(
        self, build: Callable[[], Worker[Item, Result]], items: Iterable[Item], batch_size: int
    ) -> Iterator[Result]:
        """Yield the results of workers, which actors create with `build`, in the order in which batches finish.

        All items go to Ray's object store first, which moves them to disk if there are many. Raise WorkerError if a
        worker fails, and RayError if the cluster fails.
        """
        remaining, blocks = iter(items), []
        while batch := [pickle.dumps(item) for item in islice(remaining, batch_size)]:
            blocks.append(ray.put(pyarrow.table({"item": batch})))
        dataset = ray.data.from_arrow_refs(blocks).map_batches(
            Actor,
            fn_constructor_args=(build,),
            batch_size=None,  # a block is a batch
            compute=ray.data.ActorPoolStrategy(size=self.num_engines),
            **self._resources,
        )
        for row in dataset.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, WorkerError):
                raise result
            yield result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Shut Ray down if this object started it."""
        if self._started_ray:
            ray.shutdown()
