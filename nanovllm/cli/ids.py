"""Ids: which ids there are, in eight bytes each."""

from array import array
from bisect import bisect_left
from functools import cached_property

import numpy


class Ids:
    """A set of texts of which only the hashes are kept. Add all, then ask.

    Two of a million texts have the same hash of 64 bits in one of 40 million cases.

    >>> ids = Ids()
    >>> for id in ("a", "b", "a"):
    ...     ids.add(id)
    >>> "a" in ids, "c" in ids, ids.repeated == {hash("a")}, len(ids)
    (True, False, True, 3)
    """

    def __init__(self) -> None:
        self._hashes = array("q")

    def add(self, id: str) -> None:
        assert "_sorted" not in vars(self), "ids are added first, and looked for then"
        self._hashes.append(hash(id))

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, id: str) -> bool:
        place = bisect_left(self._sorted, hash(id))
        return place < len(self) and self._sorted[place] == hash(id)

    @cached_property
    def repeated(self) -> set[int]:
        """The hashes that are there more than once."""
        view = numpy.frombuffer(self._sorted, dtype=numpy.int64) if len(self) else numpy.empty(0, numpy.int64)
        return set(view[1:][view[1:] == view[:-1]].tolist())

    @cached_property
    def _sorted(self) -> array:
        if len(self):  # numpy makes no array of an empty buffer
            numpy.frombuffer(self._hashes, dtype=numpy.int64).sort()  # in place
        return self._hashes
