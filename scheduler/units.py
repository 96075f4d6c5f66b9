"""Numbers for people: bytes and seconds."""

from __future__ import annotations


def nbytes_text(n: float) -> str:
    """Bytes: ``4.2 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def time_text(seconds: float) -> str:
    """Seconds, to three digits: ``21.3 us``."""
    for unit in ("us", "ms"):
        seconds *= 1e6 if unit == "us" else 1e-3
        if seconds < 999.5:
            return f"{seconds:.3g} {unit}"
    return f"{seconds / 1e3:.3g} s"
