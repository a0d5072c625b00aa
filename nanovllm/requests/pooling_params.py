"""PoolingParams: the parameters of a request for an embedding, with vLLM's names."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..checks import Rule, check_fields


@dataclass
class PoolingParams:
    """The parameters of a request for an embedding, which has no SamplingParams."""

    use_activation: bool | None = None  # False: the embedding is not normalized
    dimensions: int | None = None  # None or the model's hidden_size, because embeddings cannot be truncated
    task: str | None = field(default=None, kw_only=True)  # None or "embed"

    RULES: ClassVar[dict[str, Rule]] = {"task": ('"embed"', lambda task: task == "embed")}

    def __post_init__(self) -> None:
        """Check the fields. Raise ValueError with the name and value of an invalid field."""
        check_fields(self, self.RULES)
