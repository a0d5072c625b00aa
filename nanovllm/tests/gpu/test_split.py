"""The list of tiles that prefill's programs work on."""

import pytest

from ...backends.gpu.split import queries_of_tile, query_tiles


@pytest.mark.parametrize("group", range(1, 9))
def test_tiles_cover_each_query_once(group: int) -> None:
    starts, seqs = [0, 130, 131, 140, 333], [0, 2, 3]
    step = queries_of_tile(group)
    rows = [
        (seq, i) for seq, row in query_tiles(starts, seqs, group) for i in range(row, min(row + step, starts[seq + 1]))
    ]
    assert sorted(rows) == [(seq, i) for seq in seqs for i in range(starts[seq], starts[seq + 1])]
