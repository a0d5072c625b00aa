"""FlatLogprobs: the log-probabilities of an output in a few long lists.

    place 0 | place 1  | place 2        starts  0 2 5
    a  b    | c  a  d  | b  a           token_ids, logprobs, ranks and decoded_tokens: of a b c a d b a

It reads as a list of dicts does. A list of dicts is many objects that Python's garbage collector walks over again and
again; this is a few, however long the output is.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ..backends.torch.logprobs import Logprob

Place = dict[int, Logprob] | None  # None for the first token of a prompt


class FlatLogprobs(Sequence[Place]):
    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.decoded_tokens: list[str | None] = []
        self.extend(places)

    def append(self, place: Place) -> None:
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (place or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, places: Iterable[Place]) -> None:
        for place in places:
            self.append(place)

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, place: Any) -> Any:
        """A dict for a place; FlatLogprobs for a slice."""
        if isinstance(place, slice):
            return FlatLogprobs(self[each] for each in range(*place.indices(len(self))))
        entries = slice(self.start_indices[place], self.end_indices[place])
        columns = (self.logprobs[entries], self.ranks[entries], self.decoded_tokens[entries])
        return dict(zip(self.token_ids[entries], map(Logprob, *columns), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatLogprobs) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]
