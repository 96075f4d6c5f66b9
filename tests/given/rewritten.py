"""Fixtures written anew with other tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from hocket.frontends.models import Model
from hocket.frontends.open import open_model

from .models import path_of

Array = npt.NDArray[np.generic]
Tensors = dict[str, Array]


def tensors_of(name: str) -> Tensors:
    return {t.name: np.array(t.data) for t in GGUFReader(path_of(name)).tensors}


def written(path: Path, name: str, tensors: Tensors) -> Model:
    """The fixture with these tensors, written and opened."""
    fields = GGUFReader(path_of(name)).fields
    writer = GGUFWriter(path, str(fields["general.architecture"].contents()))
    for key, field in fields.items():
        kind, *inner = field.types
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), kind, inner[0] if kind is GGUFValueType.ARRAY else None)
    for tensor, array in tensors.items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_model(path)
