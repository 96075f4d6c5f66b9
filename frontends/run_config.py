"""The configuration of a model run: one table of its fields.

The arguments of `hocket.Model`, the flags of the commands that run models, the names of flags in messages, and the
pages of both follow from the fields of `RunConfig`. A session reads only the fields of `DeviceGroup`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import ClassVar

from ..backends.base import THREADS_KIND
from ..graph.dtypes import CACHE_DTYPES as KEY_VALUE_DTYPES
from ..graph.dtypes import DType
from ..graph.lazy_dataclass import dataclass
from ..graph.storage.disk_cache import cache_folder
from ..graph.validation import (
    BOOL,
    FILE_KIND,
    NONE,
    TEXT,
    ArgumentKind,
    integer_between,
    list_of,
    number_between,
    pair_of,
    require,
)
from ..scheduler import SPLIT_MODE_NAMES
from ..scheduler.runtime.packed_weight_files import PackedWeightFiles
from .adapters import FILES_KIND, ScaledFile
from .config_options import check_options, list_options, option_field
from .errors import ModelError
from .flag_values import (
    parse_devices,
    parse_natural,
    parse_placement,
    parse_positive,
    parse_scaled_file,
    parse_shares,
)

DEFAULT_BATCH = 512
NATURAL_KIND = integer_between(0)
TRANSFER_DTYPES = {str(dtype): dtype for dtype in (DType.F32, DType.BF16)}
"""Dtypes in which GPUs may exchange large sums."""
CACHE_DTYPES = {str(dtype): dtype for dtype in KEY_VALUE_DTYPES}
"""Dtypes that KV caches may have."""


def _make_dtype_name_kind(dtypes_by_name: Mapping[str, DType]) -> ArgumentKind:
    """Make the kind of an argument that must be one of the given dtype names."""
    return ArgumentKind(" or ".join(dtypes_by_name), lambda v: isinstance(v, str) and v in dtypes_by_name)


def _are_device_names(value: object) -> bool:
    names = value.split(",") if isinstance(value, str) else value
    return isinstance(names, Sequence) and len(names) > 0 and all(isinstance(name, str) and name for name in names)


DEVICE_NAMES_KIND = ArgumentKind("names of devices, as cpu:0,cpu:1", _are_device_names)
TRANSFER_DTYPE_KIND, CACHE_DTYPE_KIND = map(_make_dtype_name_kind, (TRANSFER_DTYPES, CACHE_DTYPES))


def _convert_sequences_to_tuples(value: object) -> object:
    """Return a value in which all sequences are tuples."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(map(_convert_sequences_to_tuples, value))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """The devices of a session and how they share the model; see `hocket.plan` for the split modes.

    - `threads` holds for each device; by default the devices share the processors.
    - `exact` computes in float32 throughout, with weights as float32. Backends round activations to 8 bits by default
      where weights are quantised. Several devices add in another order than one: logits of SmolLM2 on three devices
      differ by an NMSE of 5e-4, with `exact` by 2.5e-13.
    - `fast` lets backends round to 16 bits where they compute exactly by default. This applies to factors of products
      in the delta rule. Activations that meet weights of 16 bits are rounded to the dtype of the weights.
    - `wire` is the dtype in which GPUs exchange large sums: ``f32``, or ``bf16``, which has half the bytes and is not
      exact (`hocket.backends.base.Comm.wire`).
    - `cache_type_k` and `cache_type_v` are the dtypes of cached keys and values: ``f16`` by default, ``f32`` with
      `exact`. The quantised ones of `hocket.graph.dtypes.CACHE_DTYPES` take blocks of 32 numbers.
    - `keep_packed` keeps the packed weights of ``cpu`` on disk, next to its kernels. Later processes map these weights,
      share their memory and start without packing.
    """

    SUBJECT: ClassVar[str] = "DeviceGroup"
    """The subject of messages about wrong fields."""

    devices: str | Sequence[str] = option_field(
        ("cpu:0",),
        DEVICE_NAMES_KIND,
        "--devices",
        scope="plan",
        type=parse_devices,
        metavar="LIST",
        help="devices, as cpu:0,cpu:1 (cpu:0). Parts of one device are cuda:0.0 and cuda:0.1, or cuda:0/64.0 and "
        "cuda:0/64.1 with 64 multiprocessors each. Under mpiexec, cpu:0@1 is a device of rank 1, and cpu:0 is this "
        "device of every rank",
    )
    split_mode: str = option_field(
        "auto",
        TEXT,
        *("-sm", "--split-mode"),
        scope="plan",
        llama_cpp="cbp",
        metavar="MODE",
        help=f"how devices share the graph: {'; '.join(SPLIT_MODE_NAMES)} (auto). A long prompt is pipelined through "
        "devices with different layers",
    )
    tensor_split: Sequence[float] = option_field(
        (),
        list_of(number_between(-(2.0**63), 2.0**63), "a sequence of finite numbers"),
        *("-ts", "--tensor-split"),
        scope="plan",
        llama_cpp="cbp",
        type=parse_shares,
        metavar="LIST",
        help="shares of the devices, as 3,1",
    )
    place: Sequence[tuple[str, str]] = option_field(
        (),
        list_of(pair_of(TEXT, TEXT), "a sequence of pairs (regular expression, device)"),
        "--place",
        scope="plan",
        type=parse_placement,
        action="append",
        metavar="REGEX=DEVICE",
        help="run nodes with a matching name on one device, as 'ffn_up=cpu:1'. Nodes that read a weight or state with "
        "a matching name also run there; the first match applies",
    )
    threads: int | None = option_field(
        None,
        THREADS_KIND,
        *("-t", "--threads"),
        llama_cpp="cbp",
        type=parse_positive,
        metavar="N",
        help="threads of each device (its share of the processors)",
    )
    exact: bool = option_field(
        False,
        BOOL,
        "--exact",
        help="compute in float32 throughout, on CPUs with plain NumPy, which is slower. Results of SmolLM2 on one and "
        "on three devices then differ by an NMSE of 2.5e-13, otherwise by an NMSE of 5e-4",
    )
    wire: str = option_field(
        "f32",
        TRANSFER_DTYPE_KIND,
        "--wire",
        choices=tuple(TRANSFER_DTYPES),
        help="dtype in which large sums are sent between GPUs (f32)",
    )
    fast: bool = option_field(
        False,
        BOOL,
        "--fast",
        help="compute the delta rule and products with 16-bit weights in 16 bits where that is faster",
    )
    cache_type_k: str | None = option_field(
        None,
        CACHE_DTYPE_KIND | NONE,
        *("-ctk", "--cache-type-k"),
        scope="plan",
        llama_cpp="cbp",
        choices=tuple(CACHE_DTYPES),
        help="dtype of cached keys (f16; f32 for exact results)",
    )
    cache_type_v: str | None = option_field(
        None,
        CACHE_DTYPE_KIND | NONE,
        *("-ctv", "--cache-type-v"),
        scope="plan",
        llama_cpp="cbp",
        choices=tuple(CACHE_DTYPES),
        help="dtype of cached values (f16; f32 for exact results)",
    )
    keep_packed: bool = option_field(
        False,
        BOOL,
        "--keep-packed",
        help="keep the repacked weights in the cache folder, so that later runs start sooner",
    )

    def __post_init__(self) -> None:
        check_options(self, self.SUBJECT)
        for name in list_options(type(self)):
            object.__setattr__(self, name, _convert_sequences_to_tuples(getattr(self, name)))
        if isinstance(self.devices, str):
            object.__setattr__(self, "devices", tuple(self.devices.split(",")))
        if self.exact and self.wire != "f32":
            raise ModelError(f"exact=True excludes wire='{self.wire}', which rounds sums; leave out one of the two")
        if self.exact and self.fast:
            raise ModelError("exact=True excludes fast=True, which rounds to 16 bits; leave out one of the two")

    @property
    def packed_weight_files(self) -> PackedWeightFiles | None:
        """The disk cache of packed weights, or `None` if packed weights are not kept."""
        return PackedWeightFiles(cache_folder() / "packed") if self.keep_packed else None

    @property
    def cache_dtypes(self) -> tuple[DType, DType]:
        """The dtypes of cached keys and of cached values."""
        usual = "f32" if self.exact else "f16"
        return CACHE_DTYPES[self.cache_type_k or usual], CACHE_DTYPES[self.cache_type_v or usual]


ONE_DEVICE = DeviceGroup()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(DeviceGroup):
    """The configuration of a model run: the model file, the devices, the sizes of a session, adapters and drafts.

    `path` is a GGUF file or a Hugging Face folder; `None` is the embedded model.
    """

    SUBJECT: ClassVar[str] = "Model"

    path: str | Path | None = field(default=None, kw_only=False)
    context: int | None = option_field(
        None,
        NATURAL_KIND | NONE,
        *("-c", "--ctx-size"),
        scope="plan",
        llama_cpp="cp",
        type=parse_natural,
        metavar="N",
        help="tokens of context (4096, or fewer if the model allows fewer); a flag of 0: as many as the model allows",
    )
    batch: int = option_field(
        DEFAULT_BATCH,
        integer_between(1),
        *("-b", "--batch-size"),
        scope="plan",
        llama_cpp="cbp",
        type=parse_positive,
        metavar="N",
        help=f"maximum tokens of a run ({DEFAULT_BATCH})",
    )
    lora: Sequence[ScaledFile] = option_field(
        (),
        FILES_KIND,
        "--lora",
        llama_cpp="cp",
        type=parse_scaled_file,
        action="append",
        metavar="FILE[:SCALE]",
        help="LoRA adapter with an optional scale; all add up",
    )
    control_vectors: Sequence[ScaledFile] = option_field(
        (),
        FILES_KIND,
        "--control-vector",
        llama_cpp="cp",
        type=parse_scaled_file,
        action="append",
        metavar="FILE[:SCALE]",
        help="control vector with an optional scale; all add up",
    )
    control_layers: tuple[int, int] | None = option_field(
        None,
        NONE | pair_of(NATURAL_KIND, NATURAL_KIND),
        "--control-vector-layer-range",
        llama_cpp="cp",
        type=parse_natural,
        nargs=2,
        metavar=("START", "END"),
        help="the first and the last layer after which control vectors are added (all except layer 0)",
    )
    draft: str | Path | None = option_field(
        None,
        FILE_KIND | NONE,
        *("--model-draft", "--spec-draft-model", "-md"),
        scope="generate",
        llama_cpp="c",
        metavar="FILE",
        help="small model with the same tokens that drafts the next tokens",
    )
    draft_max: int | None = option_field(
        None,
        integer_between(1) | NONE,
        *("--draft", "--draft-n", "--spec-draft-n-max", "--draft-max"),
        scope="generate",
        llama_cpp="c",
        type=parse_positive,
        metavar="N",
        help="draft tokens per run (4), from the draft model or else from the MTP blocks of the model",
    )

    def __post_init__(self) -> None:
        DeviceGroup.__post_init__(self)
        require(ModelError, self.SUBJECT, "path", self.path, FILE_KIND | NONE)

    @property
    def group(self) -> DeviceGroup:
        """The device group: the fields of this configuration that choose devices and how models are split over them."""
        return DeviceGroup(**{name: getattr(self, name) for name in list_options(DeviceGroup)})


RUN_OPTIONS = list_options(RunConfig)
"""All options of a model run, by field name."""


def list_option_names_in_scopes(*scopes: str) -> frozenset[str]:
    """Return the names of the options of a model run that have one of the given scopes, such as ``generate``."""
    return frozenset(name for name, row in RUN_OPTIONS.items() if row.scope in scopes)
