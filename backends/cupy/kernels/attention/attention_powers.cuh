// What kernels over cells of 16 bits share: scores as powers of two, which become weights.

// Of the two rows that a lane has of products of tensor cores: the highest score, and the sum of weights.  Weights are as
// near as float32 where they are `fine`, and 2^UP times as large as they are.
template <int KEYS, bool fine, int UP> struct Powers {
    float top[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f};

    static __device__ __forceinline__ float power(float x) { return fine ? exp2f(x) : power_of_2(x); }
    // Scores, in units of `unit`, become weights; sums of values are to be multiplied by `fade`.
    __device__ __forceinline__ void take(float (*s)[4], float *fade, const float *unit) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float high = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
            for (int n = 1; n < KEYS / 8; n++) high = fmaxf(high, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            for (int w = 1; w < 4; w <<= 1) high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, w));
            high = fmaxf(top[r], high * unit[r]);
            fade[r] = power(top[r] - high);
            top[r] = high, sum[r] *= fade[r];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; i++) sum[r] += s[n][i] = power(fmaf(s[n][i], unit[r], -high)) * (1 << UP);
        }
    }
    // The lanes that share a row add up its weights.
    __device__ __forceinline__ void join() {
#pragma unroll
        for (int r = 0; r < 2; r++)
            for (int w = 1; w < 4; w <<= 1) sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], w);
    }
};
