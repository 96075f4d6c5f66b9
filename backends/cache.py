"""Where compiled kernels are kept, and what is said while they are made."""

from __future__ import annotations

import os
from pathlib import Path

COMPILING, COMPILED = "compiling %s", "compiled %s"
"""What is logged, at level INFO, before and after a kernel is compiled."""
MISSING = "%d kernels to compile"
"""And before several are."""
UNWRITABLE = "compiled kernels cannot be kept in %s (%s), so each start compiles them; choose another --cache-dir"
"""At level WARNING, once."""


def cache_folder() -> Path:
    """Where compiled kernels are kept: $HOCKET_CACHE_DIR, else the user's cache folder."""
    if chosen := os.environ.get("HOCKET_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hocket"
