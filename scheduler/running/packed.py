"""Packed weights on disk. The first process that runs a model writes them; later processes map them.

These processes share the memory and need not read the model's file. A file has the part of one weight on one device,
in the bytes into which a backend packs it. The digest of the source follows, which ranks compare. The path has
everything that determines these bytes: a folder for the model's file, and in it a folder for the versions of the
file and of the backend's packing. The newest version replaces the others.
"""

from __future__ import annotations

import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from ...backends.base import Array
from ...graph.files import PRIVATE, replacing
from ...graph.lazy_dataclass import dataclass
from .digests import DIGEST_BYTES

UNWRITABLE_WARNING = (
    "packed weights cannot be kept in %s (%s), so each start packs them; free space, or choose another --cache-dir"
)
log = logging.getLogger("hocket.kernels")


@dataclass(frozen=True, slots=True)
class WeightOrigin:
    """The source of a weight: a file, a text that changes with its contents, and the offset of the weight in bytes."""

    file: str
    version: str
    offset: int


class PackedWeightFiles:
    """The packed weight files of one folder.

    The arguments `packing` name how the backend packs; the arguments `share` name the device's part of a weight.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._has_to_warn = True

    def map_existing_file(
        self, origin: WeightOrigin, packing: str, share: str, nbytes: int
    ) -> tuple[Array, bytes] | None:
        """Return mapped read-only memory of `nbytes` bytes and the digest of its source; None if the file is missing.

        A file of another size counts as missing.
        """
        try:
            with open(self._make_file_path(origin, packing, share), "rb") as file:
                if os.fstat(file.fileno()).st_size != nbytes + DIGEST_BYTES:
                    return None
                mapped = mmap.mmap(file.fileno(), nbytes + DIGEST_BYTES, access=mmap.ACCESS_READ)
                return np.frombuffer(mapped, np.uint8, nbytes), mapped[nbytes:]
        except (OSError, ValueError):
            return None

    def write_and_map(
        self, origin: WeightOrigin, packing: str, share: str, packed: Array, digest: bytes
    ) -> tuple[Array, bytes]:
        """Write packed bytes to a file, and return mapped memory of it and the `digest` of their source.

        If the file cannot be written, return `packed` itself; the first time, a warning is logged.
        """
        file = self._make_file_path(origin, packing, share)
        try:
            self._remove_old_versions(file.parent)
            with replacing(file, mode=PRIVATE, durable=True) as whole:
                whole.write(packed.data)
                whole.write(digest)
        except OSError as why:
            if self._has_to_warn:
                log.warning(UNWRITABLE_WARNING, self.folder, why.strerror or str(why))
            self._has_to_warn = False
            return packed, digest
        return self.map_existing_file(origin, packing, share, packed.nbytes) or (packed, digest)

    def _make_file_path(self, origin: WeightOrigin, packing: str, share: str) -> Path:
        version = f"{origin.version} {packing}"
        return (
            self.folder
            / _hash_file_name(origin.file)
            / _hash_file_name(version)
            / f"{_hash_file_name(f'{origin.offset} {share}')}.packed"
        )

    @staticmethod
    def _remove_old_versions(version: Path) -> None:
        """Make the folder of a version, and remove the folders of other versions.

        Processes that have mapped removed files keep them.
        """
        try:
            version.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            return
        import shutil

        with suppress(OSError):
            for other in version.parent.iterdir():
                if other != version:
                    shutil.rmtree(other, ignore_errors=True)


def _hash_file_name(text: str) -> str:
    """Return a file name that stands for `text`: 32 hexadecimal digits of its SHA-256."""
    from hashlib import sha256  # loads OpenSSL, which processes without packed weights do not need

    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
