// What kernels on tensor cores share: tiles of halves, their products, and scores that become weights.

constexpr float LEAST = 0x1p-100f;  // unit of weights

// Sum of three products of a tile of A, high and low, with two tiles of B beside each other.
__device__ __forceinline__ void multiply(float *d, float *e, const u32 *high, const u32 *low, const u32 *h, const u32 *l) {
    mma_f16(d, high, l), mma_f16(e, high, l + 2);
    mma_f16(d, low, h), mma_f16(e, low, h + 2);
    mma_f16(d, high, h), mma_f16(e, high, h + 2);
}
__device__ __forceinline__ void copy_tile(u16 *to, const u16 *from, int halves) {
    for (int i = 8 * threadIdx.x; i < halves; i += 8 * blockDim.x) cp_async_16(to + i, from + i);
}
// The first tile from `i`, in steps of `step`, that is not hidden; `tiles` or more if there is none.
__device__ __forceinline__ int next_tile(const i32 *seen, int i, int step, int tiles) {
    if (seen == nullptr) return i;
    for (; i < tiles; i += 32 * step) {
        const int mine = i + (int)(threadIdx.x % 32) * step;
        const u32 some = __ballot_sync(ALL_LANES, mine < tiles && seen[mine] != HIDDEN);
        if (some) return i + (__ffs((int)some) - 1) * step;
    }
    return tiles;
}

// Of the two rows that a lane has: the highest score, the sum of weights, and a power of two; sums of values are kept in
// units of run / 2^14.
template <int KEYS> struct Weights {
    float top[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f}, run[2] = {LEAST, LEAST};

    // Products of halves become weights times the units of their values, in units of run / 2^14; sums of values are to be
    // multiplied by `change`.  `biases` are those of the lane's first row and, eight further, of the second; null where
    // nothing is added.
    __device__ __forceinline__ void take(const Args &a, float (*s)[4], float *change, const float *unit, const float *k_units, const float *v_units, const Bias *biases, int first) {
        const int t = threadIdx.x % 4;
        const float cap = (float)a.cap;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            const float2 u = *(const float2 *)(k_units + 8 * n + 2 * t);
            s[n][0] *= unit[0] * u.x, s[n][1] *= unit[0] * u.y, s[n][2] *= unit[1] * u.x, s[n][3] *= unit[1] * u.y;
        }
        if (cap > 0.0f)
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) s[i / 4][i % 4] = cap * tanhf(s[i / 4][i % 4]);
        if (biases)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Bias bias = biases[8 * r];
#pragma unroll
                for (int i = 0; i < KEYS / 4; i++) {
                    const int key = first + 8 * (i / 2) + 2 * t + i % 2;
                    float &score = s[i / 2][2 * r + i % 2];
                    score = key < a.keys ? score + bias_at(a, bias, key) : -INFINITY;  // zeros times an infinity are NaN
                }
            }
        float high[2] = {top[0], top[1]}, fade[2], most[2];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            high[0] = fmaxf(high[0], fmaxf(s[n][0], s[n][1])), high[1] = fmaxf(high[1], fmaxf(s[n][2], s[n][3]));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            for (int by = 1; by < 4; by <<= 1) high[r] = fmaxf(high[r], __shfl_xor_sync(ALL_LANES, high[r], by));
            fade[r] = grown(top[r] - high[r]);
            top[r] = high[r], sum[r] *= fade[r];
            most[r] = fmaxf(run[r] * fade[r], LEAST);
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            const float2 u = *(const float2 *)(v_units + 8 * n + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float p = grown(s[n][i] - top[i / 2]);
                sum[i / 2] += p;
                s[n][i] = p * (i % 2 ? u.y : u.x);
                most[i / 2] = fmaxf(most[i / 2], s[n][i]);
            }
        }
        // As halves: the largest, times the unit of its value, becomes 2^14 or more.
#pragma unroll
        for (int r = 0; r < 2; r++) {
            for (int by = 1; by < 4; by <<= 1) most[r] = fmaxf(most[r], __shfl_xor_sync(ALL_LANES, most[r], by));
            most[r] = __uint_as_float(__float_as_uint(most[r]) & 0xff800000u);
            const float up = 16384.0f / most[r];
            change[r] = fade[r] * (run[r] / most[r]);
            run[r] = most[r];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) s[n][2 * r] *= up, s[n][2 * r + 1] *= up;
        }
    }
    // What the sums of values of a row are multiplied by in the end; the lanes that share the row add up its weights.
    __device__ __forceinline__ float share(const Args &a, const Row &row, int r) {
        for (int by = 1; by < 4; by <<= 1) sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], by);
        return (a.splits > 1 ? 1.0f : share_of(a, row.head, top[r], sum[r])) * (run[r] / 16384.0f);
    }
};
// The weights of 16 keys as halves.
__device__ __forceinline__ void split_weights(const float (*s)[4], u32 *high, u32 *low) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 terms[2];
        split<half_bits, 2>(s[i / 2][2 * (i % 2)], s[i / 2][2 * (i % 2) + 1], terms);
        high[i] = terms[0], low[i] = terms[1];
    }
}
