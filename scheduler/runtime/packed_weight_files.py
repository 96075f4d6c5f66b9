"""Packed weight files: the first process that runs a model writes packed weights, and later processes map them.

These processes share the memory and need not read the model's file. A file has the part of one weight on one device,
in the bytes into which a backend packs it. Its note is the digest of the source, which ranks compare. The path has
everything that determines these bytes: a folder for the model's file, and in it a folder for the versions of the
file and of the backend's packing. The newest version replaces the others.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from ...backends.base import Array
from ...graph.lazy_dataclass import dataclass
from ...graph.storage.disk_cache import hash_key, map_cached_file, write_mappable_file


@dataclass(frozen=True, slots=True)
class WeightOrigin:
    """The origin of a weight, which identifies its contents.

    It consists of the file, a text that changes with the contents of the file, and the offset in bytes.
    """

    file: str
    version: str
    offset: int


class PackedWeightFiles:
    """The packed weight files of one folder.

    The arguments `packing` name how the backend packs; the arguments `share` name the part of the weight on a device.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def map_existing_file(
        self, origin: WeightOrigin, packing: str, share: str, nbytes: int
    ) -> tuple[Array, bytes] | None:
        """Map an existing packed weight file: return its memory of `nbytes` bytes, and the digest of the source.

        The memory is read-only. The result is None if the file is missing or has another size.
        """
        mapped = map_cached_file(self._make_file_path(origin, packing, share), nbytes)
        return None if mapped is None else (np.frombuffer(mapped[0], np.uint8, nbytes), mapped[1])

    def write_and_map(
        self, origin: WeightOrigin, packing: str, share: str, packed: Array, digest: bytes
    ) -> tuple[Array, bytes]:
        """Write packed bytes to a file and map it: return the mapped memory, and the `digest` of the source.

        If the file cannot be written, `packed` itself is returned, and the first time a warning is logged.
        """
        file = self._make_file_path(origin, packing, share)
        self._remove_old_versions(file.parent)
        write_mappable_file(file, packed.data, digest, "packed weights", self.folder)
        return self.map_existing_file(origin, packing, share, packed.nbytes) or (packed, digest)

    def _make_file_path(self, origin: WeightOrigin, packing: str, share: str) -> Path:
        versions = self.folder / hash_key(origin.file)
        return versions / hash_key(origin.version, packing) / hash_key(origin.offset, share)

    @staticmethod
    def _remove_old_versions(version: Path) -> None:
        """Remove the folders of old versions, unless the folder of the new version exists.

        Processes that have mapped removed files keep them.
        """
        with suppress(OSError):
            if not version.exists():
                import shutil

                for other in version.parent.iterdir():
                    if other != version:
                        shutil.rmtree(other, ignore_errors=True)
