"""``python -m hocket.conformance``: the same command as ``hocket check``."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
