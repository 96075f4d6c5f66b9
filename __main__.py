"""``python -m hocket`` is the command ``hocket``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
