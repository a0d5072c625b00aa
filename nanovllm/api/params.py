"""SamplingParams with logprobs and prompt_logprobs."""

from dataclasses import dataclass

from ..core.checks import Rule, check_fields
from ..core.sampling import SamplingParams as CoreSamplingParams

AT_LEAST_0: Rule = ("a whole number, 0 or above", lambda number: number >= 0)
RULES = {"logprobs": AT_LEAST_0, "prompt_logprobs": AT_LEAST_0}


@dataclass(frozen=True)
class SamplingParams(CoreSamplingParams):
    logprobs: int | None = None  # of each token, how many of the likeliest in its place are told beside it
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt

    def __post_init__(self) -> None:
        """Raises ValueError, naming the parameter and its value."""
        super().__post_init__()
        check_fields(self, RULES)

    @classmethod
    def of(cls, params: CoreSamplingParams) -> "SamplingParams":
        """The same parameters; core's own ask for no log-probabilities."""
        if isinstance(params, cls):
            return params
        return cls(**vars(params))
