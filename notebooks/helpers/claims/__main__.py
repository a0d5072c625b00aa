"""python -m notebooks.helpers.claims: run everything, print the table of all claims, and write the page of errata."""

import sys

from notebooks.helpers.claims import errata
from notebooks.helpers.claims.findings import table
from notebooks.helpers.claims.sections import findings
from stages.bench.texts import run_all


def main() -> int:
    found, cases = findings(), run_all(seconds=120)
    print(table(found, shown=len(found)))
    errata.PAGE.write_text(errata.page(found, cases), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
