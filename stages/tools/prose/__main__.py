"""Bring the numbers and tables of all README files up to date: `python -m stages.tools.prose`; --check compares."""

import argparse
import sys

from stages.tools.prose.marks import RESULTS, stale, write


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.tools.prose", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a number is not current")
    args = parser.parse_args(argv)
    names = stale() if args.check else write()
    for name in names:
        print(f"{name}: {'numbers differ from ' + str(RESULTS) if args.check else 'updated'}")
    return 1 if args.check and names else 0


if __name__ == "__main__":
    sys.exit(main())
