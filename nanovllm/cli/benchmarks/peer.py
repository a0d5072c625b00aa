"""transformers on the same weights, where it is installed: generate() on one static batch, padded on the left."""

import time
from importlib.util import find_spec

import torch

from ...llm import LLM
from .timing import Run
from .workload import Task


def load_peer(llm: LLM) -> "Peer | str":
    """What is told in its place if it is not there, or cannot load this checkpoint."""
    if find_spec("transformers") is None:
        return "transformers is not installed"
    try:
        return Peer(llm)
    except Exception as error:  # whatever it is, it is no fault of this engine
        return f"transformers: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Peer:
    def __init__(self, llm: LLM) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        engine = llm.llm_engine
        model = AutoModelForCausalLM.from_pretrained(llm.config.model, dtype=engine.dtype)
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)  # no penalties, no end of a text
        self._model, self._device = model.to(engine.device).eval(), engine.device

    @torch.inference_mode()
    def serve(self, tasks: list[Task]) -> Run:
        """Everybody gets as many tokens as the longest output has; only those that were asked for count."""
        width, longest = max(len(task.prompt) for task in tasks), max(task.num_tokens for task in tasks)
        rows = [[0] * (width - len(task.prompt)) + task.prompt for task in tasks]
        masks = [[0] * (width - len(task.prompt)) + [1] * len(task.prompt) for task in tasks]
        padded = torch.tensor(rows, device=self._device)  # [num_tasks, width]
        clock = Clock()
        made = self._model.generate(
            padded,
            attention_mask=torch.tensor(masks, device=self._device),
            streamer=clock if len(tasks) == 1 else None,
            max_new_tokens=longest,
        )
        made = made.tolist()  # waits for a GPU
        seconds = time.perf_counter() - clock.start
        assert len(made[0]) == width + longest, "it stopped early"
        first, *_ = times = [*clock.times, seconds]
        gaps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
        num_tokens = sum(task.num_tokens for task in tasks)
        return Run(seconds, num_tokens, longest, first_tokens=[first] if len(times) > 1 else [], gaps=gaps)


class Clock:
    """A streamer that notes when tokens came: first the prompt, then each new one."""

    def __init__(self) -> None:
        self.start, self.times = time.perf_counter(), list[float]()
        self._has_prompt = False

    def put(self, _: torch.Tensor) -> None:
        if self._has_prompt:
            self.times.append(time.perf_counter() - self.start)
        self._has_prompt = True

    def end(self) -> None:
        pass
