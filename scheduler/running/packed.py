"""Packed weights on disk: written by the first process that runs a model, mapped by those that come later, which share
their memory and need not read the model's file.

A file holds what one device has of one weight, byte by byte as a backend packs it, and after these bytes the digest of
their source, which ranks compare.  Where it lies says all that decides
these bytes: a folder for the model's file, in it one for a version of that file and of the backend's packing, of which
the newest replaces the others.
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

UNWRITABLE = (
    "packed weights cannot be kept in %s (%s), so each start packs them; free space, or choose another --cache-dir"
)
log = logging.getLogger("hocket.kernels")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the bytes of a weight come from: a file, what changes with its contents, and how far into it they lie."""

    file: str
    version: str
    offset: int


class PackedWeights:
    """What is kept in one folder.  `packing` names how the backend packs, and `share` what a device has of a weight."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._says_why = True

    def recalled(self, origin: Origin, packing: str, share: str, nbytes: int) -> tuple[Array, bytes] | None:
        """Return `nbytes` of read-only memory and the digest of their source; None where no whole file has them."""
        try:
            with open(self._file(origin, packing, share), "rb") as file:
                if os.fstat(file.fileno()).st_size != nbytes + DIGEST_BYTES:
                    return None
                mapped = mmap.mmap(file.fileno(), nbytes + DIGEST_BYTES, access=mmap.ACCESS_READ)
                return np.frombuffer(mapped, np.uint8, nbytes), mapped[nbytes:]
        except (OSError, ValueError):
            return None

    def kept(self, origin: Origin, packing: str, share: str, packed: Array, digest: bytes) -> tuple[Array, bytes]:
        """Mapped memory with the same bytes, which are written first, and the `digest` of their source; `packed` itself
        where they cannot be written, which is said once."""
        file = self._file(origin, packing, share)
        try:
            self._make_room(file.parent)
            with replacing(file, mode=PRIVATE, durable=True) as whole:
                whole.write(packed.data)
                whole.write(digest)
        except OSError as why:
            if self._says_why:
                log.warning(UNWRITABLE, self.folder, why.strerror or str(why))
            self._says_why = False
            return packed, digest
        return self.recalled(origin, packing, share, packed.nbytes) or (packed, digest)

    def _file(self, origin: Origin, packing: str, share: str) -> Path:
        version = f"{origin.version} {packing}"
        return self.folder / _name(origin.file) / _name(version) / f"{_name(f'{origin.offset} {share}')}.packed"

    @staticmethod
    def _make_room(version: Path) -> None:
        """Make the folder of a version, and remove those of others, which nobody asks for again; who has mapped their
        files keeps them."""
        try:
            version.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            return
        import shutil

        with suppress(OSError):
            for other in version.parent.iterdir():
                if other != version:
                    shutil.rmtree(other, ignore_errors=True)


def _name(text: str) -> str:
    from hashlib import sha256  # loads OpenSSL, which who keeps no weights need not do

    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
