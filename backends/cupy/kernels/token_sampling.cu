// The choice of a token among candidates, and the mask of a grammar. See ops/reduction/token_sampling.py.

// exp(x) for x <= 0, by the same rounded operations as `compute_exponential`.
__device__ __forceinline__ double exponential(double x) {
    if (!(x >= -708.0)) return 0.0;  // the result would be subnormal
    const double k = rint(__dmul_rn(x, 1.4426950408889634));
    const double r = __dadd_rn(__dadd_rn(x, -__dmul_rn(k, 6.93147180369123816490e-01)), -__dmul_rn(k, 1.90821492927058770002e-10));
    constexpr double SERIES[] = {1.0,
                                 1.0,
                                 1.0 / 2,
                                 1.0 / 6,
                                 1.0 / 24,
                                 1.0 / 120,
                                 1.0 / 720,
                                 1.0 / 5040,
                                 1.0 / 40320,
                                 1.0 / 362880,
                                 1.0 / 3628800,
                                 1.0 / 39916800,
                                 1.0 / 479001600,
                                 1.0 / 6227020800};
    double sum = SERIES[13];
#pragma unroll
    for (int n = 12; n >= 0; n--) sum = __dadd_rn(__dmul_rn(sum, r), SERIES[n]);
    return __dmul_rn(sum, __longlong_as_double((i64)(k + 1023.0) << 52));  // exact: the product is normal
}

struct Numbers {  // of one choice, as `SAMPLING_NUMBERS`
    double temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty, uniform;
};
// A logit after the penalties of a token with recent occurrences.
__device__ __forceinline__ float penalised(float x, i64 occurrences, const Numbers &by) {
    if (occurrences == 0 || x == -INFINITY) return x;
    const float penalty = (float)by.repeat_penalty, scaled = x > 0.0f ? x / penalty : x * penalty;
    const double lowered = __dadd_rn(__dmul_rn((double)occurrences, (double)(float)by.frequency_penalty), (double)(float)by.presence_penalty);
    const double y = __dadd_rn((double)scaled, -lowered), limit = 3.4028234663852886e38;
    return (float)(y < -limit ? -limit : y > limit ? limit : y);
}

struct Sampling {
    i64 count, changed;  // candidates, of which the last ones have changes
    const float *logits;
    const i32 *ids, *limit;
    const Numbers *numbers;
    const float *bias;
    const i32 *occurrences;
    i32 *out;
};
// A block for each row. Sums are computed by one thread, from the first to the last as the reference does.
__global__ void __launch_bounds__(256) sample_token(const __grid_constant__ Sampling a) {
    wait_for_earlier();
    DYNAMIC_SHARED(keys, u64);
    SHARED(shared_sum, double[1]);
    SHARED(shared_count, int[1]);
    const int n = (int)a.count, first_changed = n - (int)a.changed, thread = threadIdx.x, threads = blockDim.x;
    double *p = (double *)(keys + n);
    float *value = (float *)(p + n);
    i32 *id = (i32 *)(value + n), *token = id + n;  // in the order of candidates, and in descending order
    const i64 row = blockIdx.x;
    const Numbers by = a.numbers[row];
    for (int i = thread; i < n; i += threads) {
        id[i] = a.ids[row * n + i];
        value[i] = -INFINITY;
    }
    __syncthreads();
    float own[4];  // up to 1,024 candidates
    for (int i = thread, k = 0; i < n; i += threads, k++) {
        bool is_first = true;
        for (int j = 0; j < i; j++) is_first &= id[j] != id[i];
        float x = a.logits[row * n + i];
        i64 occurrences = 0;
        for (int j = first_changed; j < n; j++) {
            if (id[j] != id[i]) continue;
            if (a.bias) x = __fadd_rn(x, a.bias[row * a.changed + j - first_changed]);
            if (a.occurrences) occurrences += a.occurrences[row * a.changed + j - first_changed];
        }
        x = penalised(x, occurrences, by);
        own[k] = x == x ? x : -INFINITY;
        keys[i] = is_first ? item_of(own[k], id[i], true) : LAST;
    }
    const int limit = (int)min((i64)n, max((i64)1, (i64)a.limit[row]));
    if (thread == 0) shared_count[0] = 0;
    __syncthreads();
    int found = 0;
    for (int i = thread, k = 0; i < n; i += threads, k++) {
        const u64 key = keys[i];
        int rank = 0;
        for (int j = 0; j < n; j++) rank += keys[j] < key;
        if (key == LAST || rank >= limit) continue;
        value[rank] = own[k];
        found++;
        if (rank == 0) a.out[row] = id[i];
        token[rank] = id[i];
    }
    atomicAdd(&shared_count[0], found);
    __syncthreads();
    int survivors = shared_count[0];
    const float top = value[0];
    if (by.temperature == 0.0 || top - top != 0.0f) return;
    for (int r = thread; r < survivors; r += threads) p[r] = exponential((double)value[r] - (double)top);
    __syncthreads();
    if (thread == 0) {
        double sum = p[0];
        for (int r = 1; r < survivors; r++) sum = __dadd_rn(sum, p[r]);
        const double threshold = __dmul_rn(by.min_p, p[0] / sum);
        double before = 0.0;
        int by_sum = 0, by_ratio = 0;
        for (int r = 0; r < survivors; r++) {
            const double share = p[r] / sum;
            before = r == 0 ? share : __dadd_rn(before, share);
            by_sum += before < by.top_p;
            by_ratio += share >= threshold;
        }
        shared_count[0] = min(by.top_p < 1.0 ? by_sum + 1 : survivors, by_ratio);
    }
    __syncthreads();
    survivors = shared_count[0];
    for (int r = thread; r < survivors; r += threads) p[r] = exponential(((double)value[r] - (double)top) / by.temperature);
    __syncthreads();
    if (thread == 0) {
        double sum = p[0];
        for (int r = 1; r < survivors; r++) sum = __dadd_rn(sum, p[r]);
        shared_sum[0] = sum;
    }
    __syncthreads();
    for (int r = thread; r < survivors; r += threads) p[r] = p[r] / shared_sum[0];
    __syncthreads();
    if (thread != 0) return;
    for (int r = 1; r < survivors; r++) p[r] = __dadd_rn(p[r - 1], p[r]);
    int chosen = 0;
    for (int r = 0; r < survivors; r++) chosen += p[r] / p[survivors - 1] <= by.uniform;
    a.out[row] = token[min(chosen, survivors - 1)];
}

// -inf where the bit of an entry is 0.
struct Mask {
    i64 count, columns, words;
    const float *x;
    const u32 *bits;
    float *out;
};
__global__ void mask_bits(const __grid_constant__ Mask a) {
    wait_for_earlier();
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const i64 row = i / a.columns, column = i % a.columns;
    a.out[i] = a.bits[row * a.words + column / 32] >> column % 32 & 1 ? a.x[i] : -INFINITY;
}
