"""The variants of attention kernels, and the sizes and dtypes of keys and values that each supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .....graph.dtypes import DType
from .....graph.spec import Spec
from ...device.device_limits import DEFAULT_SHARED_BYTES, KernelLimits, UnmeasuredKernelCandidate
from ...device.driver import KernelSource
from ..blocks import BLOCK_TYPE_NAMES
from ..elementwise import CELL_DTYPES, CUDA_TYPE_NAMES, HALF_DTYPES, READ_TYPE_NAMES

ATTENTION_HEADERS = ("cells.cuh", "attention.cuh")
PREFILL_HEADERS = (*ATTENTION_HEADERS, "attention_powers.cuh", "attention_many.cuh")
ATTENTION_THREADS, ATTENTION_WARPS, TILE_ROWS = 128, 4, 64
MIN_TILED_ROWS = 64
"""Minimum query rows per key head for tiled variants, which first split keys and values into halves."""
CELL_ROWS = 16
"""Query rows of a block of `attend_cells`, and keys that a warp processes at a time."""
RING_BYTES = 8 * 8 + 2 * 4
"""Bytes of `attend_roles` for rings of two stages: two mbarriers for a stage of keys or values, and a note for keys."""
MAX_BUNCH_SPLITS = 12
"""Key splits that `attend_cells` adds at once as a bunch. As many bunches hold more than the most key splits."""
TERMS_BY_DTYPE = {DType.F16: 2, DType.BF16: 3}
"""Terms of the cell dtype that together are as precise as float32."""


@dataclass(frozen=True, slots=True)
class FewQueryRowsVariant:
    """The kernel `attend_few`, for few query rows. The fields are the sizes of keys and values that it supports.

    - `lanes`: warp lanes that share a key.
    - `keys`: groups of four columns of a key that each lane has; 0 means any number of columns.
    - `values`: groups of four columns of a value that each lane has.
    - `cells`: the dtype of the KV cache.
    """

    lanes: int
    keys: int
    values: int
    cells: DType = DType.F32

    @property
    def row_counts_per_block(self) -> tuple[int, ...]:
        """The possible numbers of query rows that a block processes together."""
        return (1, 2, 4, 8) if self.values * self.lanes <= 64 and not self.cells.is_quantised else (1, 2, 4)

    def choose_rows_per_block(self, row_count: int) -> int:
        """Choose the number of query rows that one block processes together.

        It is the smallest possible number that covers all `row_count` rows, or the largest possible one.
        """
        return next((r for r in self.row_counts_per_block if r >= row_count), self.row_counts_per_block[-1])

    def format_kernel_name(self, rows: int) -> str:
        """Format the C++ kernel name for blocks of `rows` query rows."""
        sizes = f"{self.lanes}, {self.keys}, {self.values}, {rows}"
        return f"attend_few<{sizes}, {str(self.keys > 0).lower()}, {READ_TYPE_NAMES[self.cells]}>"

    def make_source(self) -> KernelSource:
        """Make the source with a kernel for each possible number of rows per block."""
        return KernelSource(
            "attention_few.cu", tuple(map(self.format_kernel_name, self.row_counts_per_block)), before=ATTENTION_HEADERS
        )

    def can_process(self, key_columns: int, value_columns: int, cell_dtype: DType | None) -> bool:
        """Return whether the kernel can process keys and values with these numbers of columns and this dtype."""
        fits = key_columns <= 4 * self.lanes * self.keys and value_columns <= 4 * self.lanes * self.values
        return cell_dtype is self.cells and (fits or not self.keys)


@dataclass(frozen=True, slots=True)
class KeyTiledVariant:
    """The kernel `attend_tiles`, for many query rows: it processes the keys in tiles of `tile` keys.

    Keys have at most `size` columns, values at most `width` columns. Queries are in registers (`has_register_queries`)
    or in shared memory. No block has more than 96 KiB of shared memory.
    """

    size: int
    width: int
    tile: int
    has_register_queries: bool
    rows: int = TILE_ROWS
    threads: int = ATTENTION_THREADS

    def can_process(self, key_columns: int, value_columns: int, cell_dtype: DType | None) -> bool:
        """Return whether the kernel can process keys and values of these numbers of columns.

        `cell_dtype` is the dtype of both, or `None` if their dtypes differ.
        """
        return key_columns <= self.size and value_columns <= self.width

    @property
    def uses_warpgroups(self) -> bool:
        """Whether the kernel uses warpgroup products, which only some devices have."""
        return False

    def is_enabled(self, limits: KernelLimits) -> bool:
        """Return whether a device with `limits` uses the kernel."""
        return limits.has_warpgroups or not self.uses_warpgroups

    @property
    def visibility_tile_rows(self) -> int:
        """The number of query rows for which the visibility table has one entry per tile of keys.

        An entry says whether the mask leaves any key of the tile visible.
        """
        return max(TILE_ROWS, self.rows)

    @property
    def file(self) -> str:
        return "attention_tiles.cu"

    @property
    def name(self) -> str:
        """The C++ name of the kernel."""
        return f"attend_tiles<{self.size}, {self.width}, {self.tile}, {str(self.has_register_queries).lower()}>"

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return 4 * (self.tile * (self.size + self.width) + (0 if self.has_register_queries else TILE_ROWS * self.size))

    def make_source(self) -> KernelSource:
        return KernelSource(self.file, (self.name,), before=(*ATTENTION_HEADERS, "attention_scores.cuh"))


@dataclass(frozen=True, slots=True)
class WideKeyTiledVariant(KeyTiledVariant):
    """The attention kernel `attend_wide`, for keys and values with many columns.

    Queries and keys use the same shared memory, one after the other.
    """

    rows: int = 32
    threads: int = 256

    @property
    def file(self) -> str:
        return "attention_wide.cu"

    @property
    def name(self) -> str:
        return f"attend_wide<{self.size}, {self.width}>"

    @property
    def shared_bytes(self) -> int:
        return 4 * max(self.tile * (self.size + self.width), self.rows * self.size)


@dataclass(frozen=True, slots=True)
class Pipelined16BitCacheVariant(KeyTiledVariant):
    """The kernel `attend_short`, for 16-bit KV caches. It loads tiles in pipeline stages, without conversion."""

    stages: int = 2
    cells: DType = DType.F16

    @property
    def file(self) -> str:
        return "attention_short.cu"

    def make_source(self) -> KernelSource:
        return KernelSource(self.file, (self.name,), PREFILL_HEADERS)

    def can_process(self, key_columns: int, value_columns: int, cell_dtype: DType | None) -> bool:
        return key_columns <= self.size and value_columns <= self.width and cell_dtype is self.cells

    @property
    def name(self) -> str:
        sizes = f"{self.size}, {self.width}, {self.tile}, {self.stages}, {self.threads // 32}"
        return f"attend_short<{CUDA_TYPE_NAMES[self.cells]}, {sizes}, {str(self.has_register_queries).lower()}>"

    @property
    def shared_bytes(self) -> int:
        stages, queries = 2 * self.stages * self.tile * (self.size + self.width), 2 * self.rows * self.size
        return 16 * self.rows + (max(stages, queries) if self.has_register_queries else stages + queries)


@dataclass(frozen=True, slots=True)
class WarpgroupVariant(Pipelined16BitCacheVariant):
    """The kernel `attend_warpgroups`, for 16-bit KV caches on devices with warpgroup products.

    Its operands in shared memory begin at a multiple of 1024 bytes.
    """

    @property
    def uses_warpgroups(self) -> bool:
        return True

    @property
    def file(self) -> str:
        return "attention_warpgroups.cu"

    def make_source(self) -> KernelSource:
        return KernelSource(self.file, (self.name,), (*PREFILL_HEADERS, "wgmma.cuh"), architectures=("sm_90a",))

    @property
    def name(self) -> str:
        sizes = f"{self.size}, {self.width}, {self.tile}, {self.threads // 32}"
        return f"attend_warpgroups<{CUDA_TYPE_NAMES[self.cells]}, {sizes}>"

    @property
    def shared_bytes(self) -> int:
        return 1024 + 4 * self.tile * (self.size + self.width) + self.rows * (2 * self.size + 16)


@dataclass(frozen=True, slots=True)
class WarpRoleVariant(WarpgroupVariant):
    """The kernel `attend_roles`: four warps copy keys and values, and two warpgroups have 64 query rows each.

    It would replace `attend_warpgroups`; see `ENABLED_CANDIDATES`. Three warpgroups spill registers.
    """

    def is_enabled(self, limits: KernelLimits) -> bool:
        return limits.has_warpgroups and UnmeasuredKernelCandidate.ATTENTION_ROLES in limits.candidates

    @property
    def file(self) -> str:
        return "attention_roles.cu"

    def make_source(self) -> KernelSource:
        before = (*PREFILL_HEADERS, "wgmma.cuh", "cluster.cuh", "roles.cuh")
        return KernelSource(self.file, (self.name,), before, architectures=("sm_90a",))

    @property
    def name(self) -> str:
        return f"attend_roles<{CUDA_TYPE_NAMES[self.cells]}, {self.size}, {self.width}, {self.tile}>"

    @property
    def shared_bytes(self) -> int:
        return 1024 + 4 * self.tile * (self.size + self.width) + self.rows * (2 * self.size + 16) + RING_BYTES


@dataclass(frozen=True, slots=True)
class FewRows16BitTensorCoreVariant:
    """The kernel `attend_cells`, for few query rows and 16-bit KV caches, on tensor cores.

    Keys have at most `size` columns, values at most `width` columns. Their rows must be aligned for vector loads.
    """

    size: int
    width: int
    cells: DType

    @property
    def name(self) -> str:
        return f"attend_cells<{CUDA_TYPE_NAMES[self.cells]}, {self.size}, {self.width}>"

    @property
    def name_with_heads(self) -> str:
        """The name of the kernel that also computes the heads of one token."""
        return self.name.replace(">", ", true>")

    @property
    def query_bytes(self) -> int:
        """Bytes of shared memory of a block for its queries, as terms and as fragments of tensor cores."""
        return 4 * TERMS_BY_DTYPE[self.cells] * CELL_ROWS * self.size

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return max(self.query_bytes, 4 * ATTENTION_WARPS * self.width // 8 * (8 * CELL_ROWS + 4))

    @property
    def shared_bytes_with_heads(self) -> int:
        """Bytes of dynamic shared memory of a block that computes its queries, which are float32 numbers first.

        A few bytes more than any launch may have let the declared bytes fit, too.
        """
        count = max(self.shared_bytes, self.query_bytes + 4 * CELL_ROWS * self.size)
        return count + 16 if count == DEFAULT_SHARED_BYTES else count

    def make_source(self, computes_heads: bool = False) -> KernelSource:
        """Make the source of the kernel, or of the kernel that also computes the heads of one token."""
        heads = ("heads.cuh", "placed_heads.cuh") if computes_heads else ("read_heads.cuh",)
        before = (*ATTENTION_HEADERS, "attention_powers.cuh", "last_block.cuh", *heads)
        name = self.name_with_heads if computes_heads else self.name
        return KernelSource("attention_cells.cu", (name,), before=before)

    def can_process(self, key_columns: int, value_columns: int, cell_dtype: DType | None) -> bool:
        """Return whether the kernel can process keys and values with these numbers of columns and this dtype."""
        return key_columns <= self.size and value_columns <= self.width and cell_dtype is self.cells


_FLOAT_VARIANTS = (FewQueryRowsVariant(8, 2, 2), FewQueryRowsVariant(8, 4, 4), FewQueryRowsVariant(16, 4, 4))
_GENERAL_VARIANTS = tuple(FewQueryRowsVariant(32, fours, 4, cells) for fours in (5, 0) for cells in CELL_DTYPES)
_BLOCK_VARIANTS = tuple(
    FewQueryRowsVariant(*lanes, cells) for lanes in ((8, 4, 4), (32, 5, 4)) for cells in BLOCK_TYPE_NAMES
)
FEW_ROWS_SOURCES = {f: f.make_source() for f in (*_FLOAT_VARIANTS, *_GENERAL_VARIANTS, *_BLOCK_VARIANTS)}
"""Sources of variants for few rows. The first variant that supports the sizes is the best; of float and
16-bit cells the last supports any."""
CELL_SOURCES = {
    c: c.make_source()
    for c in (
        FewRows16BitTensorCoreVariant(*sizes, t)
        for t in HALF_DTYPES
        for sizes in ((64, 64), (128, 128), (192, 128), (256, 256))
    )
}
PLACING_CELL_SOURCES = {c: c.make_source(computes_heads=True) for c in CELL_SOURCES}
"""Sources of the kernels that also compute the heads of one token and store them in the caches."""
_PIPELINED_SIZES = (
    (64, 64, 64, True, 128, 256, 3),
    (128, 128, 64, False, 128, 256, 2),
    (192, 128, 32, False, 128, 256, 2),
    (256, 256, 32, False, 64, 128, 2),
)
_WARPGROUP_SIZES = (
    (64, 64, 128, False, 128, 256),
    (128, 128, 128, False, 128, 256),
    (192, 128, 128, False, 128, 256),
    (256, 256, 64, False, 128, 256),
)
_WARP_ROLE_SIZES = (
    (64, 64, 128, False, 128, 384),
    (128, 128, 128, False, 128, 384),
    (192, 128, 128, False, 128, 384),
    (256, 256, 64, False, 128, 384),
)
TILED_SOURCES = {
    t: t.make_source()
    for t in (
        *(WarpRoleVariant(*sizes, cells=cells) for cells in HALF_DTYPES for sizes in _WARP_ROLE_SIZES),
        *(WarpgroupVariant(*sizes, cells=cells) for cells in HALF_DTYPES for sizes in _WARPGROUP_SIZES),
        *(Pipelined16BitCacheVariant(*sizes, cells=cells) for cells in HALF_DTYPES for sizes in _PIPELINED_SIZES),
        KeyTiledVariant(64, 64, 64, True),
        KeyTiledVariant(128, 128, 32, True),
        KeyTiledVariant(192, 128, 32, False),
        KeyTiledVariant(256, 256, 16, False),
        WideKeyTiledVariant(576, 512, 16, has_register_queries=True),
    )
}
"""Sources of tiled variants. The first variant that is enabled and supports the sizes is the best."""
_COMBINE_KERNELS = ("attention_combine", "attention_combine_few")
_AUXILIARY_KERNELS = (
    "attention_seen",
    *(f"attention_split<{READ_TYPE_NAMES[cells]}>" for cells in (*CELL_DTYPES, *BLOCK_TYPE_NAMES)),
    *_COMBINE_KERNELS,
)
AUXILIARY_SOURCE = KernelSource("attention_around.cu", _AUXILIARY_KERNELS, before=ATTENTION_HEADERS)
SOURCES = (
    *FEW_ROWS_SOURCES.values(),
    *CELL_SOURCES.values(),
    *PLACING_CELL_SOURCES.values(),
    *TILED_SOURCES.values(),
    AUXILIARY_SOURCE,
)


def find_attention_rounding_error(q: Sequence[int], k: Spec, v: Spec) -> float | None:
    """Return the relative error of attention that rounds queries and weights to a 16-bit cache dtype; `None` if exact.

    Only variants for many query rows round them.

    Args:
        q: Shape of the queries [..., tokens, heads, columns].
        k: Spec of the keys.
        v: Spec of the values.
    """
    shared = q[-2] // k.shape[-2] if k.shape[-2] else 0
    many = q[-3] * shared >= MIN_TILED_ROWS and k.dtype is v.dtype
    is_short = many and any(
        isinstance(t, Pipelined16BitCacheVariant) and t.can_process(k.shape[-1], v.shape[-1], k.dtype)
        for t in TILED_SOURCES
    )
    return {DType.F16: 2.0**-11, DType.BF16: 2.0**-8}[k.dtype] if is_short else None
