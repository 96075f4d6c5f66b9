// Numbers rounded to what quantisation blocks can hold, as numbers or as blocks: a warp rounds one block, as
// ops/block_quantisers.py does.
//
// Products and sums are not contracted, so that the codes are those of the definition.  Lane i has the elements i,
// i + 32, ... of its block.

__device__ __forceinline__ float as_half(float x) { return half_to_float(float_to_half(x)); }
__device__ __forceinline__ float inverse_of(float scale) { return scale != 0.0f ? 1.0f / scale : scale; }
// Integers from what is rounded already; NaN is 0.
__device__ __forceinline__ float code_up_to(float top, float x) {
    return x != x ? 0.0f : fminf(fmaxf(truncf(x), 0.0f), top) + 0.0f;
}
__device__ __forceinline__ float nearest(float x, float top) {
    return x != x ? 0.0f : fminf(fmaxf(roundf(x), -top), top) + 0.0f;
}
__device__ __forceinline__ float warp_min(float x) { return -warp_max(-x); }

// Half of an E4M3 float without a sign.
__device__ __forceinline__ float half_of_e4m3(u32 bits) { return __uint_as_float((bits & 127) << 20) * 0x1p119f; }

// Code 0 to 15 of the 4-bit float next to x, times 2; the first of two equally near ones counts.
__device__ __forceinline__ float nearest_4_bit_float(float x, float half_scale) {
    const float values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    float found = 0.0f, error = fabsf(x);
#pragma unroll
    for (int i = 1; i < 16; i++) {
        const float other = fabsf(__fadd_rn(__fmul_rn(values[i], half_scale), -x));
        if (other < error) found = values[i], error = other;
    }
    return found;
}

// A number of a block: its code, the multiple of the scale that this is, and what the block has.
struct Coded {
    int code, level;
    float scale, lowest;
};
// Blocks that caches hold: `Own::code` turns the lanes' numbers into codes.
template <class Own, class Block> struct CodesOf : Block {
    static constexpr bool KEEPS_NAN = true;
    static __device__ __forceinline__ void round(float (&x)[1]) {
        const Coded c = Own::code(x[0]);
        x[0] = Block::number(c.level, as_half(c.scale), as_half(c.lowest));
    }
    // A NaN makes the scale one.
    static __device__ __forceinline__ void store(u8 *block, float x, int lane) {
        const Coded c = Own::code(x);
        const u16 scale = __any_sync(ALL_LANES, x != x) ? 0x7e00 : float_to_half(c.scale);
        if (Block::BITS == 8) block[Block::CODES + lane] = (u8)c.code;
        const int other = __shfl_xor_sync(ALL_LANES, c.code, 16);
        if (Block::BITS < 8 && lane < 16) block[Block::CODES + lane] = (u8)((c.code & 15) | other << 4);
        const u32 fifths = __ballot_sync(ALL_LANES, c.code & 16);
        if (Block::BITS == 5 && lane < 2) ((u16 *)(block + Block::FIFTHS))[lane] = (u16)(fifths >> 16 * lane);
        if (lane == 0) *(u16 *)block = scale;
        if (Block::HAS_LOWEST && lane == 0) *(u16 *)(block + 2) = float_to_half(c.lowest);
    }
};
// The largest magnitude is 127.
struct Symmetric : CodesOf<Symmetric, Q8_0Block> {
    static __device__ __forceinline__ Coded code(float x) {
        const float d = warp_max(fabsf(x)) / 127.0f;
        const int code = (int)nearest(__fmul_rn(x, inverse_of(d)), 127.0f);
        return {code, code, d, 0.0f};
    }
};
// The number of the largest magnitude is -MIDDLE.
template <int MIDDLE> struct Peak : CodesOf<Peak<MIDDLE>, BlockOf32<MIDDLE == 8 ? 4 : 5, MIDDLE, false>> {
    static __device__ __forceinline__ Coded code(float x) {
        const float low = warp_min(x), high = warp_max(x);
        const float d = (-low < high ? high : low) / -(float)MIDDLE;
        const int code = (int)code_up_to(2 * MIDDLE - 1, __fadd_rn(__fmul_rn(x, inverse_of(d)), MIDDLE + 0.5f));
        return {code, code - MIDDLE, d, 0.0f};
    }
};
// The smallest number is 0, the largest one is TOP.
template <int TOP> struct Range : CodesOf<Range<TOP>, BlockOf32<TOP == 15 ? 4 : 5, 0, true>> {
    static __device__ __forceinline__ Coded code(float x) {
        const float low = warp_min(x), d = __fadd_rn(warp_max(x), -low) / (float)TOP;
        const int code = (int)code_up_to(TOP, __fadd_rn(__fmul_rn(__fadd_rn(x, -low), inverse_of(d)), 0.5f));
        return {code, code, d, low};
    }
};
// The code book of IQ4_NL.
struct Book : CodesOf<Book, IQ4_NLBlock> {
    static __device__ __forceinline__ Coded code(float x) {
        const float values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        const float low = warp_min(x), high = warp_max(x);
        const float scaled = __fmul_rn(x, inverse_of((-low < high ? high : low) / -127.0f));
        float value = values[0];
        int code = 0;
#pragma unroll
        for (int i = 1; i < 16; i++)
            if (!(scaled < (values[i - 1] + values[i]) * 0.5f)) value = values[i], code = i;
        const float weighted = __fmul_rn(__fmul_rn(x, x), value);
        const float square = warp_sum(__fmul_rn(weighted, value)), sum = warp_sum(__fmul_rn(weighted, x));
        return {code, (int)value, square != 0.0f ? sum / square : 0.0f, 0.0f};
    }
};
// 4-bit floats with a common exponent.
struct Exponent {
    static constexpr int SIZE = 32;
    static constexpr bool KEEPS_NAN = false;
    static __device__ __forceinline__ void round(float (&x)[1]) {
        const int e = max((int)(__float_as_uint(warp_max(x[0] != x[0] ? 0.0f : fabsf(x[0]))) >> 23) - 2, 0);
        const float half_scale = __uint_as_float(e < 2 ? 0x200000u << e : (u32)(e - 1) << 23);
        x[0] = __fmul_rn(nearest_4_bit_float(x[0], half_scale), half_scale);
    }
};
// 4-bit floats with an E4M3 scale for each 16.
struct FloatScale {
    static constexpr int SIZE = 64;
    static constexpr bool KEEPS_NAN = false;
    static __device__ __forceinline__ void round(float (&x)[2]) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float highest = x[j] != x[j] ? 0.0f : fabsf(x[j]);
            for (int by = 8; by > 0; by >>= 1) highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, by));
            u32 scale = 0;  // the last one whose lower boundary is reached
            for (u32 bit = 64; bit > 0; bit >>= 1) {
                const u32 next = scale + bit;
                if (next < 127 && (half_of_e4m3(next - 1) + half_of_e4m3(next)) * 0.5f <= highest / 12.0f) scale = next;
            }
            x[j] = __fmul_rn(nearest_4_bit_float(x[j], half_of_e4m3(scale)), half_of_e4m3(scale));
        }
    }
};
// The mean magnitude with the sign of each number.
struct Sign {
    static constexpr int SIZE = 128;
    static constexpr bool KEEPS_NAN = true;
    static __device__ __forceinline__ void round(float (&x)[4]) {
        const float sum = (fabsf(x[0]) + fabsf(x[2])) + (fabsf(x[1]) + fabsf(x[3]));
        const float d = as_half(warp_sum(sum) / 128.0f);
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = x[j] >= 0.0f ? d : -d;
    }
};
// -1, 0 or 1 times the largest magnitude.
template <int COUNT> struct Ternary {
    static constexpr int SIZE = COUNT;
    static constexpr bool KEEPS_NAN = true;
    static __device__ __forceinline__ void round(float (&x)[COUNT / 32]) {
        float d = 0.0f;
#pragma unroll
        for (int j = 0; j < COUNT / 32; j++) d = fmaxf(d, fabsf(x[j]));
        d = warp_max(d);
#pragma unroll
        for (int j = 0; j < COUNT / 32; j++) x[j] = __fmul_rn(nearest(__fmul_rn(x[j], inverse_of(d)), 1.0f), as_half(d));
    }
};

struct RoundBlocks {
    i64 count;
    const float *x;
    float *out;
};
template <class Rule> __global__ void round_blocks(const __grid_constant__ RoundBlocks a) {
    wait_for_earlier();
    constexpr int COUNT = Rule::SIZE / 32;
    const i64 block = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (block >= a.count) return;
    const int lane = threadIdx.x % 32;
    float x[COUNT], bad = 0.0f;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        x[j] = a.x[block * Rule::SIZE + 32 * j + lane];
        bad += x[j] != x[j] ? 1.0f : 0.0f;
    }
    Rule::round(x);
    if (Rule::KEEPS_NAN && warp_sum(bad) > 0.0f)
        for (int j = 0; j < COUNT; j++) x[j] = __int_as_float(0x7fc00000);
#pragma unroll
    for (int j = 0; j < COUNT; j++) a.out[block * Rule::SIZE + 32 * j + lane] = x[j];
}

// Row i becomes blocks in row `ids[i]` of a table, or in row 0 of one of its own where there are no ids.
template <class Id> struct StoredBlocks {
    i64 rows, columns, row_step, column_step;
    Axes axes;
    Walk<u8> table;
    Walk<const Id> ids;
    Walk<const float> x;
    Fault fault;
};
template <class Rule, class Id> __global__ void store_blocks(const __grid_constant__ StoredBlocks<Id> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.table.step, a.ids.step, a.x.step};
    const Places<3> p = places(a.axes, steps, blockIdx.x);
    const i64 id = a.ids.at ? a.ids.at[p.at[1]] : 0;
    if (id < 0 || id >= a.rows) {
        if (threadIdx.x == 0) note_fault(a.fault, id);
        return;
    }
    u8 *row = a.table.at + (p.at[0] + id * a.row_step) / Rule::SIZE * Rule::BYTES;
    const float *x = a.x.at + p.at[2];
    const int lane = threadIdx.x % 32;
    for (i64 block = threadIdx.x / 32; block < a.columns / Rule::SIZE; block += blockDim.x / 32)
        Rule::store(row + block * Rule::BYTES, x[(block * Rule::SIZE + lane) * a.column_step], lane);
}
