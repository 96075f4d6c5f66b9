"""Faults that make kernels of the main path slower but not wrong, and their cases.

Dropped barriers and fences are planted in ``tests/cuda/faults/test_barriers.py`` and ``test_order.py``.
"""

from __future__ import annotations

from hocket.backends.cupy.device.driver import read_kernel_text

NORM = "rms_norm(x=f32[4,1024])"
ADD = "add(a=f32[4,512], b=f32[4,512])"
ROWS = "get_rows(table=f32[17,128], ids=i32[4])"
STORED = "set_rows(into=f32[16,128], rows=f32[4,128], ids=i32[4])"
SOFTMAX = "softmax(x=f32[2,4,256])"
VECTOR = "mul_mat(w=q8_0[64,1024], x=f32[1,1024])"
PACKED = "mul_mat(w=q4_K[64,512], x=f32[32,512])"
MATRICES = "mul_mat(w=bf16[64,128], x=f32[64,128])"
STEP = (
    "gated_delta_net(q=f32[1,2,128], k=f32[1,2,128], v=f32[1,4,128], g=f32[1,4,1], beta=f32[1,4], state=f32[4,128,128])"
)
PROMPT = (
    "gated_delta_net(q=f32[70,1,64], k=f32[70,1,64], v=f32[70,1,32], g=f32[70,1,1], beta=f32[70,1], state=f32[1,32,64])"
)
TOKEN = "attention(q=f32[1,8,128], k=f32[64,2,128], v=f32[64,2,128], scale=0.1)"
CELLS = "attention(q=f32[1,8,128], k=f16[300,2,128], v=f16[300,2,128], scale=0.1)"
SHORT = "attention(q=f32[32,4,128], k=bf16[128,1,128], v=bf16[128,1,128], scale=0.1)"
NARROW = "attention(q=f32[32,4,64], k=bf16[256,1,64], v=bf16[256,1,64], scale=0.1)"
TILES = read_kernel_text("attention.cuh")
BETWEEN = TILES.partition("8 * (c ^ (row & 7)); }\n")[2].partition("8 * ((")[0]
"""The text between two formulas."""

MEMORY_FAULTS = {
    "loads 32 numbers apart": (
        "rows.cu",
        "return x[c * a.step]; }, [&](i64, float value) { sum = fmaf",
        "c = c % 32 * 32 + c / 32; return x[c * a.step]; }, [&](i64, float value) { sum = fmaf",
        NORM,
    ),
    "lanes of a warp in other rows of a block": (
        "elements.cuh",
        "first = begin + threadIdx.x;",
        "first = begin + threadIdx.x % 32 * 8 + threadIdx.x / 32;",
        ADD,
    ),
    "rows of a table read four numbers apart": (
        "moves.cu",
        "row[c * a.column_step]; }, [&](i64 c, auto value) { out[c] = to_float(value); });",
        "row[(c % 32 * 4 + c / 32) * a.column_step]; }, "
        "[&](i64 c, auto value) { out[c % 32 * 4 + c / 32] = to_float(value); });",
        ROWS,
    ),
    "rows of a cache written four numbers apart": (
        "moves.cu",
        "x[c * a.column_step]; }, [&](i64 c, float value) { put_cell(row + c, value); });",
        "x[(c % 32 * 4 + c / 32) * a.column_step]; }, "
        "[&](i64 c, float value) { put_cell(row + c % 32 * 4 + c / 32, value); });",
        STORED,
    ),
    "one pass over a row too many": (
        "rows.cu",
        "top = fmaxf(block_max(top, room), sink);",
        "each_column<PAIRS>(a.columns, score, [&](i64, float value) { top = fmaxf(top, value); }); "
        "top = fmaxf(block_max(top, room), sink);",
        SOFTMAX,
    ),
    "every warp rounds all of x": (
        "packed_few.cu",
        "for (int eight = TOGETHER * warp; eight < (int)rows * eights; eight += TOGETHER * warps) {",
        "for (int eight = 0; eight < (int)rows * eights; eight += TOGETHER) {",
        VECTOR,
    ),
    "codes of entries in the same banks": ("packed.cu", "(i ^ (entry & 7))", "i", PACKED),
    "codes of activations stored twice": (
        "packed.cu",
        "codes[0] = r.codes[0], codes[4]",
        "codes[0] = r.codes[0], __syncwarp(), codes[0] = r.codes[0], codes[4]",
        PACKED,
    ),
    "rows of a tile in the same banks": ("tiled.cu", "PITCH = COLUMNS + 8;", "PITCH = COLUMNS;", MATRICES),
    "half of each sector of weights": (
        "tiled.cu",
        "const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 8;",
        "const int row = threadIdx.x % (S::THREADS / 4), column = threadIdx.x / (S::THREADS / 4) * 8;",
        MATRICES,
    ),
    "each stage of x comes twice": (
        "tiled.cu",
        "                block.fetch(to.x, start);\n#pragma",
        "                block.fetch(to.x, start), block.fetch(to.x, start);\n#pragma",
        MATRICES,
    ),
    "vectors taken apart": (
        "tiled.cu",
        "const bool aligned = ((u64)x & 15) == 0;",
        "const bool aligned = false;",
        MATRICES,
    ),
    "a state stored twice": (
        "gated_delta_net.cu",
        "if (back < a.stored) keep(back);",
        "if (back < a.stored) keep(back), __syncwarp(), keep(back);",
        STEP,
    ),
    "keys of a chunk in the same banks": (
        "gated_delta_net_chunks.cuh",
        "(unit ^ (UNITS >= 8 ? row & 7 : row >> 2 & 1))",
        "unit",
        PROMPT,
    ),
    "rows of a triangle in the same banks": ("gated_delta_net_prepare.cu", "STEP = C + 4;", "STEP = C;", PROMPT),
    "keys read for each query": (
        "attention_few.cu",
        "if (rows < 8) fetch();  // on its way",
        "if (rows < 8) fetch(), __syncwarp(), fetch();  // on its way",
        TOKEN,
    ),
    "cells read twice": (
        "attention_cells.cu",
        "fetch_keys(j + i);\n",
        "fetch_keys(j + i), __syncwarp(), fetch_keys(j + i);\n",
        CELLS,
    ),
    "keys and values in the same banks": (
        "attention.cuh",
        f"8 * (c ^ (row & 7)); }}\n{BETWEEN}8 * ((even & ~7) + ((even & 6) ^ turned));",
        f"8 * c; }}\n{BETWEEN}8 * (even ^ turned ^ (row & 7));",
        SHORT,
    ),
    "one stage of a product at a time": ("tiled.cu", "cp_async_wait<STAGES - 2>", "cp_async_wait<0>", MATRICES),
    "one chunk of values at a time": (
        "gated_delta_net_scan.cu",
        "cp_async_wait<AHEAD - 1>",
        "cp_async_wait<0>",
        PROMPT,
    ),
    "products wait for the next stage": (
        "packed.cu",
        "cp_async_commit();\n            for (int k",
        "cp_async_commit(), cp_async_wait<0>();\n            for (int k",
        PACKED,
    ),
    "weights of keys wait for the next tile": (
        "attention_warpgroups.cu",
        "fetch_values(tile, stage);\n        cp_async_commit();",
        "fetch_values(tile, stage);\n        cp_async_commit(), cp_async_wait<0>();",
        SHORT,
    ),
}
"""Faults by name: a file, a text of it and its replacement on as many lines, and the case that detects it.

The case shows more sectors, wavefronts or requests than are allowed, or fewer copies in flight.
"""
BY_WARPS = frozenset({"keys and values in the same banks"})
"""Faults of attention by single warps, which runs on devices without warpgroups and has no recorded page."""

MACHINE_CODE_FAULTS = {
    "bytes multiplied one by one": (
        "cuda.cuh",
        "return __dp4a(a, b, sum);",
        "for (int i = 0; i < 32; i += 8) sum += (i8)(a >> i) * (i8)(b >> i);\n    return sum;",
        "packed_few.cu: few<Q8_0, 1>",
    ),
    "weights of 16 bits come in fours": (
        "dense.cu",
        "const uint4 v = load_stream((const uint4 *)from);",
        "const u32 *p = (const u32 *)from;\n"
        "const uint4 v = make_uint4(load_stream(p), load_stream(p + 1), load_stream(p + 2), load_stream(p + 3));",
        "dense.cu: few<bf16_bits, 1>",
    ),
    "codes come in fours": (
        "packed.cuh",
        "load_words<WORDS>(low + w, first + 128 * w);",
        "for (int i = 0; i < WORDS; i++) load_words<1>(low + w + i, first + 128 * w + 4 * i);",
        "packed_few.cu: few<Q4_K, 1>",
    ),
    "states come in single numbers": (
        "gated_delta_net.cu",
        "WHOLE ? load_stream((const float4 *)from) : load_some",
        "WHOLE && a.tokens < 0 ? load_stream((const float4 *)from) : load_some",
        "gated_delta_net.cu: delta_net<128, false, true, 8, 1>",
    ),
    "keys come in single numbers": (
        "attention_few.cu",
        "if (dense) return c < n ?",
        "if (dense && step == 0) return c < n ?",
        "attention_few.cu: attend_few<8, 4, 4, 4, true, float>",
    ),
    "copies to shared memory of four bytes": (
        "cuda.cuh",
        'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(global) : "memory");',
        "const char *from = (const char *)global;\n"
        "for (int i = 0; i < 16; i += 4)"
        ' asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at + i), "l"(from + i) : "memory");',
        "tiled.cu: tiled<bf16_bits, Sizes<128, 128, 64, 32>>",
    ),
    "products in a loop": (
        "tiled.cu",
        "#pragma unroll\n        for (int k = 0; k < COLUMNS; k += 16) {",
        "#pragma unroll 1\n        for (int k = 0; k < COLUMNS; k += 16) {",
        "tiled.cu: tiled<bf16_bits, Sizes<128, 128, 64, 32>>",
    ),
    "products of a chunk in a loop": (
        "gated_delta_net_scan.cu",
        "clear(KS), clear(O);\n#pragma unroll\n",
        "clear(KS), clear(O);\n#pragma unroll 1\n",
        "gated_delta_net_scan.cu: delta_scan<64, 32, 16, false, true>",
    ),
    "the second product of a term left to the first": (
        "packed.cu",
        "#pragma unroll\n        for (int j = 0; j < G; j++) {\n            if (j >= groups) break;",
        "#pragma unroll 1\n        for (int j = 0; j < G; j++) {\n            if (j >= groups) break;",
        "packed.cu: many<Q4_K, 4, 1, 8>",
    ),
    "more blocks than registers": (
        "tiled.cu",
        "__launch_bounds__(S::THREADS) tiled",
        "__launch_bounds__(S::THREADS, 3) tiled",
        "tiled.cu: tiled<bf16_bits, Sizes<128, 128, 64, 32>>",
    ),
    "keys spilled": (
        "attention_cells.cu",
        "__launch_bounds__(THREADS, 2) attend_cells",
        "__launch_bounds__(THREADS, 4) attend_cells",
        "attention_cells.cu: attend_cells<half_bits, 128, 128>",
    ),
    "shared memory that nobody needs": (
        "rows.cu",
        "norm_by(const __grid_constant__ Rows a) {\n    wait_for_earlier();\n    SHARED(room, float[32]);",
        "norm_by(const __grid_constant__ Rows a) {\n    SHARED(all, float[32][33]);\n    float *room = all[a.step];",
        "rows.cu: norm_by<Rms>",
    ),
    "powers in float64": (
        "rows.cu",
        "return expf(score(c) - held); }",
        "return (float)exp((double)(score(c) - held)); }",
        "rows.cu: softmax",
    ),
    "places by divisions of 64 bits": (
        "elements.cuh",
        "const u32 next = rest[e] / divisor, here = rest[e] - next * divisor;",
        "const i64 next = (i64)rest[e] / axes.size[a], here = rest[e] - next * axes.size[a];",
        "elementwise.cu: binary<function::add>",
    ),
    "fragments read number by number": (
        "cuda.cuh",
        'asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"\n'
        '                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");',
        "const int lane = threadIdx.x % 32;\n"
        "    for (int m = 0; m < 4; m++) {\n"
        "        const u32 row_at = __shfl_sync(ALL_LANES, at, 8 * m + lane / 4);\n"
        '        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r[m]) : "r"(row_at + 4 * (lane % 4)) : "memory");\n'
        "    }",
        "attention_short.cu: attend_short<half_bits, 128, 128, 64, 2, 8, false>",
    ),
}
"""Faults by name: a file, a text of it and its replacement, and the kernel that detects it.

Its machine code for sm_90a shows narrower loads, fewer tensor cores, longer loops, more registers, or spills.
"""

PROLOGUES_AND_HEADS = "_fuse_matmuls_and_their_rows", "_fuse_query_key_value_head_patterns"
EXPECTED_LAUNCHES = {
    "qwen35": (21, ("_fuse_delta_rule_and_inputs", "_fuse_gated_unit_and_its_rows", *PROLOGUES_AND_HEADS)),
    "qwen3next": (
        26,
        (
            "_fuse_delta_rule_and_inputs",
            "_fuse_gated_rms_norm",
            "_fuse_matmuls_their_rows_and_routing",
            "_fuse_expert_and_shared_gated_units",
            "_fuse_weighted_expert_and_shared_sum",
            *PROLOGUES_AND_HEADS,
        ),
    ),
    "qwen3moe": (
        19,
        (
            "_fuse_matmuls_their_rows_and_routing",
            "_fuse_expert_gated_units",
            "_fuse_down_projections_and_weighted_sum",
            *PROLOGUES_AND_HEADS,
        ),
    ),
    "llama": (17, ("_fuse_gated_unit_and_its_rows", *PROLOGUES_AND_HEADS)),
}
"""By model: the launches of a decoded token, and the chains that each save some of them."""
