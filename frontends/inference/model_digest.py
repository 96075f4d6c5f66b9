"""The identity of a model, which a saved state and all processes compare with the running model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..gguf.mapped_file import MappedFile
from ..models import Model

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""Linux file with a random id that the kernel draws at each boot, so that it differs on every machine."""


def compute_model_digest(model: Model) -> str:
    """Compute the SHA-256 digest of a model, in hexadecimal.

    It covers the architecture, the adapters, the names, shapes and dtypes of tensors, and the data of small tensors.
    """
    sha = hashlib.sha256(model.architecture.encode())
    sha.update(" ".join(map(repr, model.adapters.lora_and_control_scales)).encode())
    adapted = model.adapters.tensors
    for name, tensor in sorted(model.tensors.items()):
        sha.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        if tensor.nbytes <= 1 << 16 or name in adapted:  # norms and biases differ between fine-tunings of one shape
            sha.update(tensor.stored_elements.tobytes())
    return sha.hexdigest()


def make_shared_mapping_key(files: Iterable[MappedFile]) -> str:
    """Make a key that is equal in two processes if they map the same files on the same machine.

    The key consists of the boot id of the machine, and of the inode, size and time of each file. It is empty if one of
    these is unknown.
    """
    known = {file.inode and f"{file.inode} {file.size} {file.modified_ns}" for file in files}
    with suppress(OSError):
        return f"{BOOT_ID_FILE.read_text().strip()} {sorted(known)}" if all(known) else ""
    return ""
