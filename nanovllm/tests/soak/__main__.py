import sys

from .run import main

if __name__ == "__main__":  # but not in the processes that it starts
    sys.exit(main())
