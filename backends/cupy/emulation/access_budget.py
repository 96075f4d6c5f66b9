"""The access budget of the kernels on the main path.

`MAIN_PATH_CASES` launch these kernels. Each access must have its minimum cost in sectors or wavefronts. An entry of
`ACCESS_ALLOWANCES` allows one source line a higher cost, with a reason. A new kernel of the main path needs a new case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..device.driver import find_kernel_path
from .access_counters import AccessSiteCounters, LaunchCounters

MAX_SECTOR_OVERHEAD = 1.05
"""The maximum ratio of the bytes of distinct sectors to the requested bytes of a launch."""
MAIN_PATH_CASES = (
    "mul_mat(w=q8_0[64,1024], x=f32[1,1024])",
    "mul_mat(w=bf16[64,512], x=f32[1,512])",
    "rms_norm(x=f32[4,1024])",
    "softmax(x=f32[2,4,256])",
    "rope(x=f32[2,2,64], pos=i32[2], n_dims=64, base=500000.0)",
    "add(a=f32[4,512], b=f32[4,512])",
    "swiglu(gate=f32[2,512], up=f32[2,512])",
    "ssm_conv(x=f32[19,64], w=f32[64,4])",
    "top_k(x=f32[4,128], k=8)",
    "get_rows(table=f32[17,128], ids=i32[4])",
    "set_rows(into=f32[16,128], rows=f32[4,128], ids=i32[4])",
    "gated_delta_net(q=f32[1,2,128], k=f32[1,2,128], v=f32[1,4,128], g=f32[1,4,1], beta=f32[1,4], "
    "state=f32[4,128,128])",
    "mul_mat(w=q4_K[64,512], x=f32[32,512])",  # two stages
    "mul_mat(w=bf16[64,128], x=f32[64,128])",
    "gated_delta_net(q=f32[70,1,64], k=f32[70,1,64], v=f32[70,1,32], g=f32[70,1,1], beta=f32[70,1], "
    "state=f32[1,32,64])",
    *(f"mul_mat(w={w}[64,{n}], x=f32[{t},{n}])" for w in ("mxfp4", "nvfp4") for n, t in ((1024, 1), (512, 32))),
    "attention(q=f32[1,8,128], k=f32[64,2,128], v=f32[64,2,128], scale=0.1)",
    "attention(q=f32[1,8,128], k=f16[300,2,128], v=f16[300,2,128], scale=0.1)",  # in two splits, which are combined
    "attention(q=f32[32,4,128], k=bf16[128,1,128], v=bf16[128,1,128], scale=0.1)",
)


@dataclass(frozen=True, slots=True)
class AccessCostAllowance:
    """A permission for one source line to access memory less efficiently than the access budget allows in general.

    Attributes:
        file: Name of the source file.
        code: Text that occurs in this line only.
        max_ratio: Maximum ratio of the cost to the minimum cost.
        reason: Reason for the cost.
    """

    file: str
    code: str
    max_ratio: float
    reason: str


ACCESS_ALLOWANCES = (
    AccessCostAllowance(
        "cells.cuh",
        "one = *(const float4 *)from, two = *(const float4 *)(from + 4)",
        2.0,
        "a lane loads 8 numbers of a query in two loads, once per block",
    ),
    AccessCostAllowance(
        "attention_cells.cu",
        "one = *(const uint2 *)(rows + from + chunk(g, c, D))",
        2.0,
        "rows of queries have bank conflicts, once per block",
    ),
    AccessCostAllowance(
        "dense.cu",
        "to[0] = brought[0], to[4] = brought[1]",
        2.0,
        "rows that a block computes lie as products read them, once per block",
    ),
    AccessCostAllowance(
        "routing.cuh",
        "share = lane < used ? numbers[own]",
        2.0,
        "the numbers of the chosen experts are arbitrary, once per token",
    ),
    AccessCostAllowance(
        "packed.cu",
        "codes[0] = r.codes[0], codes[4] = r.codes[1];",
        2.0,
        "halves of sectors are stored separately",
    ),
    AccessCostAllowance(
        "packed.cu", "cp_async_16(stage + (2 * STEP + b)", 2.0, "rows of scales are 1 KiB apart; one scale per 2 codes"
    ),
    AccessCostAllowance(
        "gated_delta_net_prepare.cu",
        "for (int m = c; m < w; m++) sum = fma4(L21[r * STEP + m], *(const float4 *)(X11 + m * STEP + c), sum);",
        2.5,
        "bank conflicts, also in NVRTC's reads of 8 and 16 bytes; needs a new stride",
    ),
    AccessCostAllowance(
        "gated_delta_net_prepare.cu",
        "put_pair<EXACT, 2>(s.record + below(I, J), R::SQUARE, r, c, x[0] * beta[0], x[1] * beta[1]);",
        2.0,
        "rows have bank conflicts; another row stride avoids them",
    ),
    AccessCostAllowance(
        "gated_delta_net_prepare.cu",
        "s.L[r * Square<C>::STEP + c] = r > c ? beta[r] * x : 0.f;",
        2.0,
        "rows have bank conflicts; another row stride avoids them",
    ),
    AccessCostAllowance(
        "gated_delta_net_prepare.cu",
        "s.L[r * Square<C>::STEP + c + 1] = r > c + 1 ? beta[r] * y : 0.f;",
        2.0,
        "rows have bank conflicts; another row stride avoids them",
    ),
    AccessCostAllowance(
        "gated_delta_net_scan.cu",
        "cp_async_16(V + r * V_STEP, next_values);",
        1.1,
        "the last copies of a warp begin another row",
    ),
    AccessCostAllowance(
        "gated_delta_net_scan.cu",
        "*(float4 *)(V + r * V_STEP) = make_float4(0, 0, 0, 0);",
        1.2,
        "the last copies of a warp begin another row",
    ),
    AccessCostAllowance(
        "dense.cu",
        "(const float4 *)(x[n] + c + i)",
        2.0,
        "a lane loads 8 numbers of x in two loads, from L1",
    ),
    AccessCostAllowance(
        "packed.cuh", "return at[32 * i + row]", 2.0, "16 rows have one exponent byte each, which is half a sector"
    ),
    *(
        AccessCostAllowance(
            "packed_few.cu",
            code,
            2.0,
            "a thread reads the sums of a row from all its products, once per block",
        )
        for code in (
            "each_own([&](int i) { sums[i] = 0.0f; });",
            "sums[i] += parts[w * SIZE + i];",
            "float result = total[0];",
            "result = gated(a.unit, total[0], total[SIZE]);",
        )
    ),
    AccessCostAllowance(
        "short_convolution.cu",
        "const float w0 = w[0], w1 = w[a.w_tap]",
        4.0,
        "a lane loads the four weights of a channel in four loads; all of them are in L1",
    ),
    AccessCostAllowance(
        "delta_inputs.cuh",
        "taps[i] = *(const float4 *)(w + 4 * (channel + i));",
        2.0,
        "a lane loads the weights of four channels in four loads; all of them are in L1",
    ),
    *(
        AccessCostAllowance("sorting.cu", code, 1.25, "in some steps two items of half a warp have a bank conflict")
        for code in ("x[c] = held[place_of(first | c << low)];", "held[place_of(first | c << low)] = x[c];")
    ),
    AccessCostAllowance(
        "rotary.cu", "return x[c * a.step];", 2.0, "lanes read the two numbers of a pair one after the other"
    ),
    AccessCostAllowance(
        "rotary.cu", "out[c * a.out_step] = value;", 2.0, "lanes write the two numbers of a pair one after the other"
    ),
)


@dataclass(frozen=True, slots=True)
class AccessTableRow:
    """One row of the report about memory accesses: the sums over all accesses of one kind and width in a kernel.

    `worst_site` is the access with the largest cost above the minimum.
    """

    kernel: str
    access_kind: str
    requests: int
    cost: int
    minimum_cost: int
    worst_site: AccessSiteCounters

    @property
    def cost_ratio(self) -> float:
        """The ratio of the cost to the minimum cost."""
        return self.cost / self.minimum_cost


def build_row_per_access_kind(counted: LaunchCounters) -> list[AccessTableRow]:
    """Build the rows of a launch in the access table: one for each kind of access, sorted by kind."""
    kinds: dict[str, list[AccessSiteCounters]] = {}
    for site in counted.sites:
        kinds.setdefault(site.access_kind, []).append(site)
    return [
        AccessTableRow(
            counted.kernel,
            what,
            sum(site.requests for site in sites),
            sum(site.cost for site in sites),
            sum(site.minimum_cost for site in sites),
            max(sites, key=lambda site: site.cost - site.minimum_cost),
        )
        for what, sites in sorted(kinds.items())
    ]


def list_budget_violations(counted: LaunchCounters) -> list[str]:
    """List the memory accesses of a launch that cost more than the access budget allows, as one line of text each."""
    violations = []
    if counted.sector_bytes > MAX_SECTOR_OVERHEAD * counted.requested_bytes:
        violations.append(
            f"{counted.kernel} moves {counted.sector_bytes} bytes of sectors, and requests {counted.requested_bytes}"
        )
    for site in counted.sites:
        if site.cost > _find_allowed_cost_ratio(site) * site.minimum_cost:
            unit = "wavefronts" if site.is_shared else "sectors"
            violations.append(f"{counted.kernel}: {site.cost} {unit} instead of {site.minimum_cost} at {site}")
    return violations


def _find_allowed_cost_ratio(site: AccessSiteCounters) -> float:
    """Return the maximum ratio of cost to minimum cost that the source line of an access may have.

    The ratio is 1 for a line without an allowance.
    """
    file, _, line = site.source_line.partition(":")
    return max(
        (a.max_ratio for a in ACCESS_ALLOWANCES if a.file == file and a.code in _read_source_line(file, line)),
        default=1.0,
    )


def _read_source_line(file: str, line: str) -> str:
    """Read one line of a kernel source by its number. Return "" if there is no such line."""
    path = find_kernel_path(file)
    return path.read_text("utf-8").splitlines()[int(line) - 1] if path.exists() and line.isdecimal() else ""


def format_access_allowance_page(launches: Iterable[LaunchCounters]) -> str:
    """Format the Markdown page with the memory accesses of each kernel and the allowances that it uses."""
    lines = [
        "# Memory accesses of CUDA kernels",
        "",
        "Written by `hocket check --backend cuda-emulated --counters > benchmarks/kernels_cuda.md`, which counts in",
        "the emulation. A cost is the number of sectors of 32 bytes in global memory, or of wavefronts in shared",
        "memory, for the requests of warps. The ratio divides it by the minimum for the requested bytes. The cost of",
        "an access of 8 or 16 bytes of shared memory is a lower bound. The worst line has the largest cost above the",
        "minimum.",
        "",
        "| kernel | access | requests | cost per request | ratio to minimum | worst line |",
        "|---|---|---|---|---|---|",
    ]
    counters = sorted(launches, key=lambda counted: counted.kernel)
    for row in (row for counted in counters for row in build_row_per_access_kind(counted)):
        worst_line = row.worst_site.source_line if row.cost_ratio > 1 else ""
        lines.append(
            f"| `{row.kernel}` | {row.access_kind} | {row.requests} | {row.cost / row.requests:.2f} "
            f"| {row.cost_ratio:.2f} | {worst_line} |"
        )
    lines += [
        "",
        "The copies in flight are groups of copies (`cp.async`) that a thread has started while it reads earlier",
        "ones. An empty cell means that the kernel has no such copies.",
        "",
        "| kernel | bytes of distinct sectors | ratio to requested bytes | threads per block | copies in flight |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{c.kernel}` | {c.sector_bytes} | {c.sector_bytes / max(c.requested_bytes, 1):.3f} | {c.block_threads} "
        f"| {'' if c.copies_in_flight is None else c.copies_in_flight} |"
        for c in counters
    ]
    above = {
        row.worst_site.source_line.partition(":")[0]
        for counted in counters
        for row in build_row_per_access_kind(counted)
        if row.cost_ratio > 1
    }
    allowed = [
        f"- `{a.file}`: {a.max_ratio:g} times; {a.reason}:\n  `{a.code}`" for a in ACCESS_ALLOWANCES if a.file in above
    ]
    return "\n".join([*lines, *(["", "Lines that may exceed the minimum:", "", *allowed] if allowed else [])])
