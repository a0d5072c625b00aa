"""SamplingParams with logprobs and prompt_logprobs."""

from dataclasses import dataclass

from ..core.sampling import SamplingParams as CoreSamplingParams


@dataclass(frozen=True)
class SamplingParams(CoreSamplingParams):
    logprobs: int | None = None  # of each token, how many of the likeliest in its place are told beside it
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt

    def __post_init__(self) -> None:
        """Raises ValueError, naming the parameter and its value."""
        super().__post_init__()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"{name} must be a whole number, 0 or above, or None, not {value!r}")

    @classmethod
    def of(cls, params: CoreSamplingParams) -> "SamplingParams":
        """The same parameters; core's own ask for no log-probabilities."""
        if isinstance(params, cls):
            return params
        return cls(**vars(params))
