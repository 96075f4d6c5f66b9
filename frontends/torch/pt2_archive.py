"""Read files of ``torch.export.save`` without unpickling, so that an untrusted file runs no code.

The reader of PyTorch unpickles example inputs and some weights, loads compiled libraries, evaluates expressions, and
calls any function that a node names. This reader accepts only JSON and plain tensors, and nodes may call only ATen and
prims ops.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...graph.errors import format_install_command
from ..errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

MAX_PROGRAM_BYTES = 1 << 28
"""Largest size in bytes of the JSON text of a program, without its weights."""
ALLOWED_TARGET = re.compile(r"torch\.ops\.(aten|prims)\.\w+\.\w+|_operator\.getitem")
"""Pattern of the functions that a node may call."""
SYMBOLIC_KEYS = ("as_expr", "expr_str", "as_sym_int", "as_sym_ints", "as_sym_float", "as_sym_bool")
"""JSON keys of symbolic expressions, which occur only where shapes vary."""
LEAF_KINDS = ("weights", "constants")
"""Folders of an archive that hold tensors."""


def read_program(path: str) -> ExportedProgram:
    """Read the exported program of a file, with its weights.

    Raises:
        ModelError: The file is damaged, or ``torch.export.save`` does not write it for plain tensors and static shapes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _deserialise_program(_ArchiveMembers(path, archive))
    except ModelError:
        raise
    except ImportError as why:
        raise ModelError(f"{path}: needs a newer PyTorch ({why}); {format_install_command('torch')}") from None
    except Exception as why:  # a damaged file gives errors of many kinds, of PyTorch, JSON and zip files
        first = str(why).strip().partition("\n")[0]
        raise ModelError(f"{path}: cannot be read: {type(why).__name__}: {first:.200}") from None


class _ArchiveMembers:
    """The files in a zip archive, by their paths below its first folder. All of them must be uncompressed."""

    def __init__(self, path: str, archive: zipfile.ZipFile) -> None:
        self.path, self.archive = path, archive
        self.zip_infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if packed := next((i.filename for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED), ""):
            raise ModelError(f"{path}: {packed} is compressed; torch.export.save compresses nothing")
        programs = [name for name in self.zip_infos if re.fullmatch(r"models/[^/]+\.json", name)]
        if len(programs) != 1:
            raise ModelError(f"{path}: has {len(programs)} exported programs; need a file that torch.export.save wrote")
        self.program_path = programs[0]
        self.program_name = self.program_path.removeprefix("models/").removesuffix(".json")

    def read_bytes(self, name: str) -> bytes:
        """Return the content of one member.

        Raises:
            ModelError: The member is missing.
        """
        if name not in self.zip_infos:
            raise ModelError(f"{self.path}: {name} is missing")
        return self.archive.read(self.zip_infos[name])

    def read_json(self, name: str) -> Any:
        """Parse one JSON member.

        Raises:
            ModelError: The member is missing or too large.
        """
        if name in self.zip_infos and self.zip_infos[name].file_size > MAX_PROGRAM_BYTES:
            raise ModelError(f"{self.path}: {name} has more than {MAX_PROGRAM_BYTES} bytes")
        return json.loads(self.read_bytes(name))


def _deserialise_program(members: _ArchiveMembers) -> ExportedProgram:
    """Build an exported program from an archive; its JSON text is checked first, so that nothing harmful is loaded."""
    from torch._export.serde import schema
    from torch._export.serde.serialize import ExportedProgramDeserializer, _dict_to_dataclass

    program_json = members.read_json(members.program_path)
    _refuse_harmful_and_remove_guards(members.path, program_json)
    weights, constants = (_read_tensors(members, kind) for kind in LEAF_KINDS)
    written = _dict_to_dataclass(schema.ExportedProgram, program_json)
    return ExportedProgramDeserializer().deserialize(written, weights, constants, None)


def _refuse_harmful_and_remove_guards(path: str, program_json: dict[str, Any]) -> None:
    """Make the JSON text of a program safe to load: refuse harmful entries, and remove guards and metadata in place.

    PyTorch would evaluate text in these entries, or look up names. hocket needs neither guards nor metadata.

    Raises:
        ModelError: A shape is symbolic, a node calls another function than an ATen or prims op, or a pytree spec names
            classes of other modules.
    """
    if program_json.get("range_constraints") or any(
        part.get(key) for part in _iterate_mappings(program_json) for key in SYMBOLIC_KEYS
    ):
        raise ModelError(f"{path}: has shapes that vary; export the program without dynamic_shapes")
    program_json["guards_code"] = []
    for part in _iterate_mappings(program_json):
        if "metadata" in part:
            part["metadata"] = {}
        if "target" in part and "inputs" in part and not ALLOWED_TARGET.fullmatch(str(part["target"])):
            raise ModelError(f"{path}: calls {str(part['target'])!r:.100}; a program in a file may call ATen ops alone")
        for spec in ("in_spec", "out_spec"):
            if "__enum__" in str(part.get(spec)):
                raise ModelError(f"{path}: {spec} names a class of another module; use plain lists and mappings")


def _iterate_mappings(tree: Any) -> Iterator[dict[str, Any]]:
    """Iterate over all mappings in a JSON tree."""
    stack = [tree]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
            stack.extend(part.values())
        elif isinstance(part, list):
            stack.extend(part)


def _read_tensors(members: _ArchiveMembers, kind: str) -> dict[str, torch.Tensor]:
    """Read the tensors in one folder of the archive (`kind`), by name.

    Each tensor is a view of the bytes of its file.

    Raises:
        ModelError: A tensor is pickled.
    """
    config = f"data/{kind}/{members.program_name}_{kind}_config.json"
    import torch

    tensors: dict[str, torch.Tensor] = {}
    read: dict[str, bytearray] = {}
    for name, entry in members.read_json(config)["config"].items():
        file = entry["path_name"]
        if entry.get("use_pickle") or not entry.get("tensor_meta"):
            raise ModelError(f"{members.path}: {name!r:.100} is pickled, which could run code; it is not read")
        if file not in read:
            read[file] = bytearray(members.read_bytes(f"data/{kind}/{file}"))
        plain = _view_tensor(read[file], entry["tensor_meta"])
        tensors[name] = torch.nn.Parameter(plain, requires_grad=False) if entry["is_param"] else plain
    return tensors


def _view_tensor(data: bytearray, metadata: Mapping[str, Any]) -> torch.Tensor:
    """View bytes as a tensor with the dtype, the sizes, the strides and the offset of its metadata."""
    import torch
    from torch._export.serde.serialize import deserialize_scalar_type

    dtype = deserialize_scalar_type(metadata["dtype"])
    sizes, strides = ([int(n["as_int"]) for n in metadata[key]] for key in ("sizes", "strides"))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    start = int(metadata["storage_offset"]["as_int"])
    return flat.as_strided(sizes, strides, start)
