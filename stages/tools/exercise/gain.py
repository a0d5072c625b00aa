"""The gain of a stage, counted on the same work: `python stages/tools/exercise/gain.py STAGE BEFORE NOW`.

STAGE is the package whose tests/gain.py counts: before(engine, folder) and now(engine, folder), each a dict of counts
by name. BEFORE and NOW are the packages of the two engines: a learner's is exercises.s2. Prints its first line, which
names the work, a table, in which the names in its COSTS are marked as the price of the gain, and then its LOOK: a
command that shows more.

No stage is before the first one: BEFORE is STAGE itself, whose before() does without the idea, and BEFORE in its
tests/gain.py is the title of that column.
"""

import sys
import tempfile
from collections.abc import Container
from importlib import import_module
from pathlib import Path


def table(before: dict[str, int], now: dict[str, int], titles: tuple[str, str], costs: Container[str] = ()) -> str:
    """Return a table with one line per count.

    >>> print(table({"slots": 1024, "copies": 0}, {"slots": 16, "copies": 3}, ("stage 1", "yours"), ["copies"]))
                          stage 1  yours
      slots                 1,024     16
      copies (the price)        0      3
    """
    assert before.keys() == now.keys(), "the two do not count the same"
    names = {name: f"{name} (the price)" if name in costs else name for name in now}
    rows = [("", *titles), *((names[name], f"{before[name]:,}", f"{now[name]:,}") for name in now)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"  {a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)


def main(argv: list[str]) -> None:
    sys.path.pop(0)  # the folder of this file: its modules are not top-level ones
    stage, before, now = argv
    gain = import_module(f"{stage}.tests.gain")
    with tempfile.TemporaryDirectory() as folder:
        old = gain.before(import_module(before), Path(folder))
        new = gain.now(import_module(now), Path(folder))
    number = before.rpartition(".")[2].partition("_")[0].removeprefix("s")
    titles = (gain.BEFORE if before == stage else f"stage {number}", "your code")
    print(f"{(gain.__doc__ or '').splitlines()[0]}\n\n{table(old, new, titles, getattr(gain, 'COSTS', ()))}")
    if look := getattr(gain, "LOOK", ""):
        print("\n" + look.format(your_code=now).rstrip())


if __name__ == "__main__":
    main(sys.argv[1:])
