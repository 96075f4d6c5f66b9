// Numbers rounded to what super-blocks of 256 can hold: a warp rounds one, as ops/super_block_quantisers.py does.
//
// Each of the first lanes has a sub-block, whose sums it adds from the first element to the last, without contraction: so
// that scales and codes are those of the definition.

constexpr int SUPER_BLOCK = 256;
constexpr float ZERO_MAGNITUDE = 1e-15f;  // no larger magnitude counts

__device__ __forceinline__ float as_half(float x) { return half_to_float(float_to_half(x)); }
__device__ __forceinline__ float ratio(float x, float y) { return y != 0.0f ? x / y : 0.0f; }
__device__ __forceinline__ float code_of(float x, float low, float high) {
    return x != x ? 0.0f : fminf(fmaxf(rintf(x), low), high) + 0.0f;  // no minus zero
}
template <int SIZE> __device__ __forceinline__ float peak_of(const float (&x)[SIZE]) {
    float peak = 0.0f;
    for (int i = 0; i < SIZE; i++)
        if (fabsf(x[i]) > fabsf(peak)) peak = x[i];
    return peak;
}
// The first scale of the largest magnitude among the lanes; NaN is larger than all others.
__device__ __forceinline__ float peak_of_lanes(float scale) {
    const float size = scale != scale ? INFINITY : fabsf(scale), magnitude = warp_max(size);
    const u32 is_nan = __ballot_sync(ALL_LANES, scale != scale), found = is_nan ? is_nan : __ballot_sync(ALL_LANES, size == magnitude);
    return __shfl_sync(ALL_LANES, scale, found ? __ffs((int)found) - 1 : 0);
}
struct Sums {  // of products of weights, numbers and codes
    float lx = 0.0f, l2 = 0.0f;
    __device__ __forceinline__ void add(float w, float x, float l) {
        lx = __fadd_rn(lx, __fmul_rn(__fmul_rn(w, x), l)), l2 = __fadd_rn(l2, __fmul_rn(__fmul_rn(w, l), l));
    }
    // Whether the error is less than where `best` is the square of the sum by its scale.
    __device__ __forceinline__ bool beats(float best) const { return l2 > 0.0f && __fmul_rn(lx, lx) > __fmul_rn(best, l2); }
};

// Q2_K, Q4_K and Q5_K: scales and minima of LEVELS steps.  The first candidate divides the range by TOP + FIRST / 10.
template <int OF, int TOP, int FIRST, int COUNT, int LEVELS, bool ABSOLUTE> struct WithMinimum {
    static constexpr int SIZE = OF;
    static constexpr bool KEEPS_NAN = true;

    static __device__ __forceinline__ float error_of(float w, float difference) {
        return __fmul_rn(w, ABSOLUTE ? fabsf(difference) : __fmul_rn(difference, difference));
    }
    static __device__ void search(const float (&x)[SIZE], float &scale, float &minimum) {
        float high = x[0], mean = 0.0f, sum_w = 0.0f, sum_x = 0.0f, best = 0.0f;
        minimum = fminf(x[0], 0.0f);
        for (int i = 0; i < SIZE; i++)
            high = fmaxf(high, x[i]), minimum = fminf(minimum, x[i]), mean = __fadd_rn(mean, __fmul_rn(x[i], x[i]));
        mean = ABSOLUTE ? 0.0f : sqrtf(mean / (float)SIZE);
        const auto weight = [&](int i) { return ABSOLUTE ? fabsf(x[i]) : __fadd_rn(mean, fabsf(x[i])); };
        scale = 0.0f;
        if (high == minimum) return;
        const float inverse = (float)TOP / __fadd_rn(high, -minimum);
        scale = ratio(1.0f, inverse);
        for (int i = 0; i < SIZE; i++) {
            const float code = code_of(__fmul_rn(inverse, __fadd_rn(x[i], -minimum)), 0.0f, TOP);
            sum_w = __fadd_rn(sum_w, weight(i)), sum_x = __fadd_rn(sum_x, __fmul_rn(weight(i), x[i]));
            best = __fadd_rn(best, error_of(weight(i), __fadd_rn(__fadd_rn(__fmul_rn(scale, code), minimum), -x[i])));
        }
        for (int step = 0; step < COUNT; step++) {
            const float factor = __fadd_rn(__fadd_rn(0.1f * (float)FIRST, __fmul_rn(0.1f, (float)step)), (float)TOP);
            const float by = ratio(factor, __fadd_rn(high, -minimum)), from = minimum;
            const auto code = [&](int i) { return code_of(__fmul_rn(by, __fadd_rn(x[i], -from)), 0.0f, TOP); };
            float sum_l = 0.0f, sum_l2 = 0.0f, sum_xl = 0.0f, error = 0.0f;
            for (int i = 0; i < SIZE; i++) {
                const float wl = __fmul_rn(weight(i), code(i));
                sum_l = __fadd_rn(sum_l, wl), sum_l2 = __fadd_rn(sum_l2, __fmul_rn(wl, code(i)));
                sum_xl = __fadd_rn(sum_xl, __fmul_rn(wl, x[i]));
            }
            const float determinant = __fadd_rn(__fmul_rn(sum_w, sum_l2), -__fmul_rn(sum_l, sum_l));
            if (!(determinant > 0.0f)) continue;
            float new_scale = __fadd_rn(__fmul_rn(sum_w, sum_xl), -__fmul_rn(sum_x, sum_l)) / determinant;
            float new_minimum = __fadd_rn(__fmul_rn(sum_l2, sum_x), -__fmul_rn(sum_l, sum_xl)) / determinant;
            if (new_minimum > 0.0f) new_minimum = 0.0f, new_scale = ratio(sum_xl, sum_l2);
            for (int i = 0; i < SIZE; i++)
                error = __fadd_rn(error, error_of(weight(i), __fadd_rn(__fadd_rn(__fmul_rn(new_scale, code(i)), new_minimum), -x[i])));
            if (error < best) best = error, scale = new_scale, minimum = new_minimum;
        }
    }
    static __device__ __forceinline__ void round(float (&x)[SIZE], bool mine) {
        float scale = 0.0f, minimum = 0.0f;
        if (mine) search(x, scale, minimum);
        const float top = fmaxf(warp_max(scale), 0.0f), deepest = fmaxf(warp_max(-minimum), 0.0f), levels = LEVELS;
        const float d = __fmul_rn(as_half(top / levels), code_of(__fmul_rn(ratio(levels, top), scale), 0.0f, levels));
        const float low = __fmul_rn(as_half(deepest / levels), code_of(__fmul_rn(ratio(levels, deepest), -minimum), 0.0f, levels));
        for (int i = 0; i < SIZE; i++)
            x[i] = __fadd_rn(__fmul_rn(code_of(ratio(__fadd_rn(x[i], low), d), 0.0f, TOP), d), -low);
    }
};

// Sub-blocks of 16 with a scale alone; the scale of the largest magnitude is -LEVELS times that of the super-block.
template <int MIDDLE, int LEVELS, class Search> struct Signed {
    static constexpr int SIZE = 16;
    static constexpr bool KEEPS_NAN = Search::KEEPS_NAN;
    static __device__ __forceinline__ void round(float (&x)[SIZE], bool mine) {
        const float scale = mine && fabsf(peak_of(x)) >= ZERO_MAGNITUDE ? Search::scale_of(x) : 0.0f;
        const float factor = ratio(-(float)LEVELS, peak_of_lanes(scale));
        const float level = code_of(__fmul_rn(factor, scale), -LEVELS, LEVELS - 1);
        const float d = __fmul_rn(as_half(ratio(1.0f, factor)), level);
        for (int i = 0; i < SIZE; i++)
            x[i] = __fmul_rn(d != 0.0f ? code_of(x[i] / d, -MIDDLE, MIDDLE - 1) : -(float)MIDDLE, d);
    }
};
// Q3_K: one code after the other is changed if that lowers the error.
struct OneByOne {
    static constexpr bool KEEPS_NAN = true;
    static __device__ float scale_of(const float (&x)[16]) {
        const float factor = -4.0f / peak_of(x);
        float codes[16];
        Sums sums;
        for (int i = 0; i < 16; i++) {
            codes[i] = code_of(__fmul_rn(factor, x[i]), -4.0f, 3.0f);
            sums.add(__fmul_rn(x[i], x[i]), x[i], codes[i]);
        }
        for (int pass = 0; pass < 5; pass++)
            for (int i = 0; i < 16; i++) {
                const float w = __fmul_rn(x[i], x[i]);
                Sums rest;
                rest.lx = __fadd_rn(sums.lx, -__fmul_rn(__fmul_rn(w, x[i]), codes[i]));
                rest.l2 = __fadd_rn(sums.l2, -__fmul_rn(__fmul_rn(w, codes[i]), codes[i]));
                if (!(rest.lx > 0.0f)) continue;
                const float code = code_of(ratio(__fmul_rn(x[i], rest.l2), rest.lx), -4.0f, 3.0f);
                if (code == codes[i]) continue;
                rest.add(w, x[i], code);
                if (rest.l2 > 0.0f && __fmul_rn(__fmul_rn(rest.lx, rest.lx), sums.l2) > __fmul_rn(__fmul_rn(sums.lx, sums.lx), rest.l2))
                    codes[i] = code, sums = rest;
            }
        return ratio(sums.lx, sums.l2);
    }
};
// Q6_K: the best of 19 scales.
struct Nineteen {
    static constexpr bool KEEPS_NAN = false;
    static __device__ float scale_of(const float (&x)[16]) {
        const float peak = peak_of(x);
        float scale = 0.0f, best = 0.0f;
        for (int i = 0; i < 19; i++) {
            const int step = i == 0 ? 0 : i < 10 ? i - 10 : i - 9;
            const float factor = ratio(-__fadd_rn(32.0f, __fmul_rn(0.1f, (float)step)), peak);
            Sums sums;
            for (int c = 0; c < 16; c++) sums.add(__fmul_rn(x[c], x[c]), x[c], code_of(__fmul_rn(factor, x[c]), -32.0f, 31.0f));
            if (i == 0 ? sums.l2 > 0.0f : sums.beats(best)) scale = ratio(sums.lx, sums.l2), best = __fmul_rn(scale, sums.lx);
        }
        return scale;
    }
};
// IQ4_XS: sub-blocks of 32, the code book of IQ4_NL.
struct BookWithScales {
    static constexpr int SIZE = 32;
    static constexpr bool KEEPS_NAN = false;
    static __device__ __forceinline__ float value_of(float x) {
        const float values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        float value = values[0];
#pragma unroll
        for (int i = 1; i < 16; i++)
            if (!(x < (values[i - 1] + values[i]) * 0.5f)) value = values[i];
        return value;
    }
    static __device__ float scale_of(const float (&x)[SIZE]) {
        const float peak = peak_of(x);
        if (fabsf(peak) < ZERO_MAGNITUDE) return 0.0f;
        float scale = 0.0f, best = 0.0f;
        for (int step = -8; step <= 7; step++) {
            const float factor = step < -7 ? ratio(1.0f, -peak / -127.0f) : ratio(step - 127.0f, peak);
            Sums sums;
            for (int i = 0; i < SIZE; i++) {
                const float value = value_of(__fmul_rn(factor, x[i])), weighted = __fmul_rn(__fmul_rn(x[i], x[i]), value);
                sums.lx = __fadd_rn(sums.lx, __fmul_rn(weighted, x[i])), sums.l2 = __fadd_rn(sums.l2, __fmul_rn(weighted, value));
            }
            if (step < -7 ? sums.l2 > 0.0f : sums.beats(best)) scale = ratio(sums.lx, sums.l2), best = __fmul_rn(scale, sums.lx);
        }
        return scale;
    }
    static __device__ __forceinline__ void round(float (&x)[SIZE], bool mine) {
        const float scale = mine ? scale_of(x) : 0.0f, d = -peak_of_lanes(scale) / 32.0f;
        const float level = code_of(__fmul_rn(ratio(1.0f, d), scale), -32.0f, 31.0f), inverse = ratio(1.0f, __fmul_rn(d, level));
        for (int i = 0; i < SIZE; i++) x[i] = __fmul_rn(value_of(__fmul_rn(inverse, x[i])), __fmul_rn(as_half(d), level));
    }
};

struct RoundBlocks {
    i64 count;
    const float *x;
    float *out;
};
template <class Rule> __global__ void round_super_blocks(const __grid_constant__ RoundBlocks a) {
    wait_for_earlier();
    constexpr int SIZE = Rule::SIZE;
    const i64 block = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (block >= a.count) return;
    const int lane = threadIdx.x % 32;
    const bool mine = lane < SUPER_BLOCK / SIZE;
    const i64 at = block * SUPER_BLOCK + lane * SIZE;
    float x[SIZE], bad = 0.0f;
    for (int i = 0; i < SIZE; i++) {
        x[i] = mine ? a.x[at + i] : 0.0f;
        bad += x[i] != x[i] ? 1.0f : 0.0f;
    }
    Rule::round(x, mine);
    const bool is_nan = Rule::KEEPS_NAN && warp_sum(bad) > 0.0f;
    if (mine)
        for (int i = 0; i < SIZE; i++) a.out[at + i] = is_nan ? __int_as_float(0x7fc00000) : x[i];
}
