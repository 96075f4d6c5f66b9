"""Progress bars of tqdm, which a terminal or a notebook shows."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any


def is_progress_visible() -> bool:
    """Whether progress bars are shown.

    They are shown if stderr is a terminal, or if Python runs in a notebook. The environment variable ``TQDM_DISABLE``
    of tqdm switches all of them off.
    """
    if os.environ.get("TQDM_DISABLE", "0") not in ("", "0"):
        return False
    return _is_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def open_progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Open a progress bar of tqdm.

    The bar disappears at its end. It shows nothing unless `is_progress_visible`.

    Args:
        items: The items to count while they are iterated, if any.
        **options: Further options of tqdm.
    """
    if _is_notebook():
        with warnings.catch_warnings(action="ignore"):  # without ipywidgets the bar is text
            from tqdm.auto import tqdm
    else:
        from tqdm import tqdm  # 15 ms
    return tqdm(items, **{"leave": False, "disable": not is_progress_visible(), **options})


def _is_notebook() -> bool:
    """Whether IPython runs this process as the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
