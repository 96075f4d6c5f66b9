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
from ...graph.storage.disk_cache import hash_key_to_file_name, map_cached_file, write_mappable_file


@dataclass(frozen=True, slots=True)
class WeightOrigin:
    """Where a weight was loaded from: a file, its version and a position, which together identify the contents.

    - `file`: the path of the file.
    - `version`: a text that changes whenever the contents of the file change.
    - `offset`: the first byte of the weight in the file.
    """

    file: str
    version: str
    offset: int


class PackedWeightFiles:
    """A folder of weight files in the form that kernels read ("packed"), which processes map into memory.

    So several processes share the memory, and a later start is faster. The arguments `packing` identify how a backend
    packs. The arguments `share` identify the part of the weight on a device.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def map_file_of_right_size(
        self, origin: WeightOrigin, packing: str, share: str, nbytes: int
    ) -> tuple[Array, bytes] | None:
        """Map a packed weight file into memory, if it exists with the right size; else return None.

        Args:
            origin: The source of the weight.
            packing: Identifies how the backend packs.
            share: Identifies the part of the weight.
            nbytes: The bytes of the packed part.

        Returns:
            The read-only memory, and the digest of the unpacked source.
        """
        mapped = map_cached_file(self._make_file_path(origin, packing, share), nbytes)
        return None if mapped is None else (np.frombuffer(mapped[0], np.uint8, nbytes), mapped[1])

    def write_and_map(
        self, origin: WeightOrigin, packing: str, share: str, packed: Array, digest: bytes
    ) -> tuple[Array, bytes]:
        """Write packed bytes to a file, and map the file into memory.

        If the file cannot be written, `packed` itself is returned, and the first time a warning is logged.

        Args:
            origin: The source of the weight.
            packing: Identifies how the backend packs.
            share: Identifies the part of the weight.
            packed: The packed bytes.
            digest: The digest of the unpacked source.

        Returns:
            The mapped memory, and `digest`.
        """
        file = self._make_file_path(origin, packing, share)
        self._remove_old_versions(file.parent)
        write_mappable_file(file, packed.data, digest, "packed weights", self.folder)
        return self.map_file_of_right_size(origin, packing, share, packed.nbytes) or (packed, digest)

    def _make_file_path(self, origin: WeightOrigin, packing: str, share: str) -> Path:
        versions = self.folder / hash_key_to_file_name(origin.file)
        return versions / hash_key_to_file_name(origin.version, packing) / hash_key_to_file_name(origin.offset, share)

    @staticmethod
    def _remove_old_versions(version: Path) -> None:
        """Remove the folders of all other versions of a model's packed weights, before the first file of a new version.

        Processes that have mapped removed files keep them.
        """
        with suppress(OSError):
            if not version.exists():
                import shutil

                for other in version.parent.iterdir():
                    if other != version:
                        shutil.rmtree(other, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class PackedFileKey:
    """The key of a packed weight file: the folder, the source of the weight, and the part of it on one device."""

    packed_files: PackedWeightFiles
    origin: WeightOrigin
    share_text: str
