"""Whether engines make the same tokens. Where they first differ, how near the two likeliest tokens were to a tie."""

from typing import Any

from ...engine.sampling_params import SamplingParams
from ...llm import LLM
from .answers import Answer
from .workload import Task


def agreement(llm: LLM, tasks: list[Task], here: Answer, there: Answer) -> dict[str, float]:
    """The number of requests with equal tokens; of the others, the margins in logits at the first token that differs.

    Behind that token the two go on from different texts: nothing is to be compared there.
    """
    places = [first_difference(a, b) for a, b in zip(here.tokens, there.tokens, strict=True)]
    texts = [
        task.prompt + made[:place]
        for task, made, place in zip(tasks, here.tokens, places, strict=True)
        if place is not None
    ]
    found: dict[str, float] = {"equal": places.count(None), "of": len(places)}
    return found | ({"largest_margin": max(margins(llm, texts))} if texts else {})


def first_difference(a: list[int], b: list[int]) -> int | None:
    """
    >>> first_difference([3, 4, 5], [3, 9, 5]), first_difference([3], [3])
    (1, None)
    """
    return next((place for place, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)


def margins(llm: LLM, texts: list[list[int]]) -> list[float]:
    """How far apart the two best logits behind each text are, as this engine computes them."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=2)
    outputs: list[Any] = llm.generate([*texts], params, use_tqdm=False)
    best = [sorted(told.logprob for told in output.outputs[0].logprobs[0].values()) for output in outputs]
    return [each[-1] - each[-2] for each in best]


def as_sentence(found: dict[str, float]) -> str:
    """
    >>> as_sentence({"equal": 3, "of": 3})
    'the tokens of all 3 requests are the same'
    >>> as_sentence({"equal": 2, "of": 3, "largest_margin": 0.00021})
    'tokens of 2 of 3 requests are the same; where others first differ, the two best logits are at most 0.00021 apart'
    """
    if found["equal"] == found["of"]:
        return f"the tokens of all {found['of']} requests are the same"
    margin = f"the two best logits are at most {found['largest_margin']:.2g} apart"
    return f"tokens of {found['equal']} of {found['of']} requests are the same; where others first differ, {margin}"
