"""Which model it is: what a saved state and other processes have to share with the one that goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .gguf.mapped_file import MappedFile
from .models import Model

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Linux: a number that the running kernel has drawn at its start, which no other machine has."""


def model_digest(model: Model) -> str:
    """SHA-256 of a model: architecture, tensors, their shapes and types, and the entries of the small ones and of all
    adapters."""
    sha = hashlib.sha256(model.architecture.encode())
    sha.update(" ".join(map(repr, model.adapters.scales)).encode())
    adapted = model.adapters.tensors
    for name, tensor in sorted(model.tensors.items()):
        sha.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        if tensor.nbytes <= 1 << 16 or name in adapted:  # norms and biases tell two fine-tunings of one shape apart
            sha.update(tensor.raw.tobytes())
    return sha.hexdigest()


def files_identity(files: Iterable[MappedFile]) -> str:
    """Return the running machine and the inodes of mapped files; equal where processes map the very same memory.

    It is empty where the machine or an inode is unknown.
    """
    known = {file.inode and f"{file.inode} {file.size} {file.modified_ns}" for file in files}
    with suppress(OSError):
        return f"{BOOT.read_text().strip()} {sorted(known)}" if all(known) else ""
    return ""
