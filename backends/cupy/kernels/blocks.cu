// Numbers rounded to what quantisation blocks can hold: a warp rounds one block, as ops/block_quantisers.py does.
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

// The largest magnitude is 127.
struct Symmetric {
    static constexpr int SIZE = 32;
    static constexpr bool KEEPS_NAN = true;
    static __device__ __forceinline__ void round(float (&x)[1]) {
        const float d = warp_max(fabsf(x[0])) / 127.0f;
        x[0] = __fmul_rn(nearest(__fmul_rn(x[0], inverse_of(d)), 127.0f), as_half(d));
    }
};
// The number of the largest magnitude is -MIDDLE.
template <int MIDDLE> struct Peak {
    static constexpr int SIZE = 32;
    static constexpr bool KEEPS_NAN = true;
    static __device__ __forceinline__ void round(float (&x)[1]) {
        const float low = warp_min(x[0]), high = warp_max(x[0]);
        const float d = (-low < high ? high : low) / -(float)MIDDLE;
        const float code = code_up_to(2 * MIDDLE - 1, __fadd_rn(__fmul_rn(x[0], inverse_of(d)), MIDDLE + 0.5f));
        x[0] = __fmul_rn(code - MIDDLE, as_half(d));
    }
};
// The smallest number is 0, the largest one is TOP.
template <int TOP> struct Range {
    static constexpr int SIZE = 32;
    static constexpr bool KEEPS_NAN = true;
    static __device__ __forceinline__ void round(float (&x)[1]) {
        const float low = warp_min(x[0]), d = __fadd_rn(warp_max(x[0]), -low) / (float)TOP;
        const float code = code_up_to(TOP, __fadd_rn(__fmul_rn(__fadd_rn(x[0], -low), inverse_of(d)), 0.5f));
        x[0] = __fadd_rn(__fmul_rn(code, as_half(d)), as_half(low));
    }
};
// The code book of IQ4_NL.
struct Book {
    static constexpr int SIZE = 32;
    static constexpr bool KEEPS_NAN = true;
    static __device__ __forceinline__ void round(float (&x)[1]) {
        const float values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        const float low = warp_min(x[0]), high = warp_max(x[0]);
        const float scaled = __fmul_rn(x[0], inverse_of((-low < high ? high : low) / -127.0f));
        float value = values[0];
#pragma unroll
        for (int i = 1; i < 16; i++)
            if (!(scaled < (values[i - 1] + values[i]) * 0.5f)) value = values[i];
        const float weighted = __fmul_rn(__fmul_rn(x[0], x[0]), value);
        const float square = warp_sum(__fmul_rn(weighted, value)), sum = warp_sum(__fmul_rn(weighted, x[0]));
        x[0] = __fmul_rn(value, as_half(square != 0.0f ? sum / square : 0.0f));
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
