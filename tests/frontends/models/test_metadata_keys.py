"""The table of metadata keys: complete, true of the reader; a key without support is refused by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from gguf.constants import Keys as PackageKeys

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import Gguf, open_gguf
from hocket.frontends.gguf.hyperparameter_keys import ArchitectureMetadata
from hocket.frontends.gguf.metadata import LazyMetadataArray
from hocket.frontends.models import ARCHITECTURES, load_model
from hocket.frontends.models.layers.rwkv import Rwkv7TimeMix
from hocket.frontends.models.metadata_keys import METADATA_KEYS, READ

from ...given.models.architectures import ALL, FOLDER
from ...given.models.exact import open_with_metadata
from ...given.models.goldens import open_fixture

GUESSED = ("{arch}.pooling_type", "{arch}.classifier.pooling_type")
"""Keys that are read when a vector or a score is asked for; test_language_model.py, test_embed.py and test_ranking.py
try their values."""


def test_every_key_that_the_package_gguf_names_is_in_the_table() -> None:
    groups = (group for group in vars(PackageKeys).values() if isinstance(group, type))
    names = {v for group in groups for n, v in vars(group).items() if isinstance(v, str) and not n.startswith("__")}
    assert len(names) > 200
    assert {n for n in names if n not in METADATA_KEYS and not n.startswith(("clip.vision.", "clip.audio."))} == set()


class Recorded(dict[str, object]):
    """Metadata that note which keys are asked for."""

    def __init__(self, metadata: dict[str, object]) -> None:
        super().__init__(metadata)
        self.asked: set[str] = set()

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> object:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def headers() -> Iterator[Gguf]:
    """The metadata of a file of each architecture, without its weights."""
    with TemporaryDirectory() as folder:
        for name in ALL:
            path = Path(folder) / f"{name}.gguf"  # which stays mapped
            with np.load(FOLDER / f"{name}.npz") as packed:
                path.write_bytes(packed["head"].tobytes())
            yield open_gguf(path, header_only=True)
    yield from map(open_fixture, ("qwen35", "gemma3"))
    yield open_with_metadata("llama", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    llama = open_fixture("llama")
    metadata = {k.replace("llama.", "hunyuan-dense.", 1): v for k, v in llama.metadata.items()}
    yield replace(llama, metadata={**metadata, "general.architecture": "hunyuan-dense"})


@cache
def asking() -> dict[str, list[Gguf]]:
    """For each key, the files with a reader that asks for it."""
    found = defaultdict(list)
    for gguf in headers():
        metadata = Recorded(dict(gguf.metadata))
        load_model(replace(gguf, metadata=metadata))
        architecture = gguf.metadata["general.architecture"]
        for key in metadata.asked:
            found[key.replace(f"{architecture}.", "{arch}.", 1)].append(gguf)
    return found


def test_every_key_that_a_reader_asks_for_is_read_by_the_table() -> None:
    assert {n for n in asking() if n not in METADATA_KEYS or (METADATA_KEYS[n].use == "ignored")} == set()


def others(value: object) -> Iterator[object]:
    """Values that differ from one."""
    if isinstance(value, LazyMetadataArray):
        yield "no array"
        return
    if isinstance(value, str):
        yield from ("none", "other")
    elif isinstance(value, bool) or value is None:
        yield from (True, False)
    if not isinstance(value, str | bool):
        number = 0 if value is None else value
        assert isinstance(number, int | float)
        yield from (number + 1, 2 * number + 2, 3, 0.5, -1.0, 1e30, False)


def makes_a_difference(name: str, gguf: Gguf) -> bool:
    """Whether another value is refused, or gives other hyperparameters."""
    key = name.replace("{arch}", str(gguf.metadata["general.architecture"]))
    before = load_model(gguf).hyper
    for value in others(gguf.metadata.get(key)):
        try:
            after = load_model(replace(gguf, metadata={**gguf.metadata, key: value})).hyper  # type: ignore[dict-item]
        except ModelError:
            return True
        if after != before:
            return True
    return False


OF_RWKV = ("{arch}.wkv.head_size", "{arch}.rescale_every_n_layers")


@pytest.mark.long(cases=8)
@pytest.mark.parametrize(
    "name",
    [n for n, k in METADATA_KEYS.items() if k.use == READ and n.startswith("{arch}") and n not in (*GUESSED, *OF_RWKV)],
)
def test_a_key_that_is_read_changes_the_model_or_is_refused(name: str) -> None:
    assert any(makes_a_difference(name, gguf) for gguf in asking()[name])


def test_the_keys_of_rwkv_are_checked() -> None:
    gguf = open_with_metadata("llama", wkv__head_size=24, embedding_length=64)
    with pytest.raises(ModelError, match=r"wkv\.head_size is 24; need a divisor of embedding_length 64"):
        Rwkv7TimeMix.from_keys(ArchitectureMetadata(gguf, "llama"), ARCHITECTURES["rwkv7"], 0)


def test_a_key_whose_effect_is_not_computed_is_refused_by_name() -> None:
    load_model(open_with_metadata("llama", hrm__prefix_lm=False))
    with pytest.raises(ModelError, match=r"llama\.hrm\.prefix_lm is True; hocket computes False alone") as caught:
        load_model(open_with_metadata("llama", hrm__prefix_lm=True))
    assert "\n" not in str(caught.value)


def test_streams_other_than_the_first_cannot_be_the_active_one() -> None:
    load_model(open_with_metadata("llama", altup__active_idx=0))
    with pytest.raises(ModelError, match=r"llama\.altup\.active_idx is 1; hocket computes 0 alone"):
        load_model(open_with_metadata("llama", altup__active_idx=1))


def test_a_reason_stands_beside_every_key() -> None:
    assert all(key.reason and key.use in ("read", "ignored", "default only") for key in METADATA_KEYS.values())
