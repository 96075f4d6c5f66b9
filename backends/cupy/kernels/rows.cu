// Rows: norms, softmax, sums, order.  One block makes one row, unless something else is said.

struct Rows {
    i64 columns, step;  // entries of a row, and the step between them in the source
    Axes axes;          // of the rows
    Walk<const float> x;
    Walk<float> out;
    double number;
};
constexpr int MOST_THREADS = 512;  // of a row; two blocks of them share a multiprocessor
constexpr int PAIRS = 4;  // of loads that are under way together: eight do not fit the registers of two blocks
constexpr int HELD = 8;   // columns of a thread that it keeps in registers: rows of up to 4,096
#define A_ROW __launch_bounds__(MOST_THREADS, 2)
template <int TOGETHER = 8, class Of> __device__ __forceinline__ float sum_over(i64 columns, float *room, Of of) {
    float sum = 0.0f;
    each_column<TOGETHER>(columns, of, [&](i64, float value) { sum += value; });
    return block_sum(sum, room);
}

// ----------------------------------------------------------------------------------------------------- norms

struct Rms {
    static __device__ float factor(float squares, i64 n, float eps) { return 1.0f / sqrtf(squares / (float)n + eps); }
};
struct L2 {
    static __device__ float factor(float squares, i64 n, float eps) { return 1.0f / sqrtf(squares + eps); }
};
struct L2Clamped {
    static __device__ float factor(float squares, i64 n, float eps) {
        const float norm = sqrtf(squares);
        return 1.0f / (norm < eps ? eps : norm);  // NaN stays
    }
};
template <class F> __global__ void A_ROW norm_by(const __grid_constant__ Rows a) {
    wait_for_earlier();
    SHARED(room, float[32]);
    const i64 *const steps[] = {a.x.step, a.out.step};
    const Places<2> p = places(a.axes, steps, blockIdx.x);
    const float *x = a.x.at + p.at[0];
    float *out = a.out.at + p.at[1];
    float sum = 0.0f;
    each_column(a.columns, [&](i64 c) { return x[c * a.step]; }, [&](i64, float value) { sum = fmaf(value, value, sum); });
    const float squares = block_sum(sum, room);
    const float factor = F::factor(squares, a.columns, (float)a.number);
    each_column(a.columns, [&](i64 c) { return x[c * a.step]; }, [&](i64 c, float value) { out[c] = value * factor; });
}
// x, or x + y, which becomes `sum`, divided by its root mean square and multiplied by w.
struct ScaledNorm {
    i64 columns, step, w_step;
    double eps;
    const float *w;
    Axes axes;  // of the rows
    Walk<const float> x, y;  // y and sum: null where there is one operand; dense rows, as out
    Walk<float> sum, out;
};
__global__ void A_ROW scaled_norm(const __grid_constant__ ScaledNorm a) {
    SHARED(room, float[32]);
    const i64 *const steps[] = {a.x.step, a.y.step, a.sum.step, a.out.step};
    const Places<4> p = places(a.axes, steps, blockIdx.x);
    const float *x = a.x.at + p.at[0], *y = a.y.at + p.at[1];
    float *sum = a.sum.at + p.at[2], *out = a.out.at + p.at[3];
    const bool adds = a.y.at;
    const i64 columns = a.columns;
    if (blockIdx.x == 0)
        for (i64 c = threadIdx.x; c < columns; c += blockDim.x) prefetch(a.w + c * a.w_step);
    wait_for_earlier();
    if (columns <= HELD * blockDim.x) {  // in registers; all is asked for before the first is waited for
        float held[HELD] = {}, more[HELD] = {}, w[HELD] = {}, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (i * blockDim.x < columns) {
                const i64 c = min((i64)(threadIdx.x + i * blockDim.x), columns - 1);
                held[i] = x[c * a.step], w[i] = a.w[c * a.w_step];
                if (adds) more[i] = y[c];
            }
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const i64 c = threadIdx.x + i * blockDim.x;
            held[i] += more[i];
            if (c >= columns) continue;
            squares = fmaf(held[i], held[i], squares);
            if (adds) sum[c] = held[i];
        }
        const float factor = Rms::factor(block_sum(squares, room), columns, (float)a.eps);
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (threadIdx.x + i * blockDim.x < columns) out[threadIdx.x + i * blockDim.x] = held[i] * factor * w[i];
        return;
    }
    float squares = 0.0f;
    auto square = [&](i64, float value) { squares = fmaf(value, value, squares); };
    if (adds)
        each_column<PAIRS>(
            columns, [&](i64 c) { return make_float2(x[c * a.step], y[c]); },
            [&](i64 c, float2 both) { square(c, sum[c] = both.x + both.y); });
    else
        each_column(columns, [&](i64 c) { return x[c * a.step]; }, square);
    const float factor = Rms::factor(block_sum(squares, room), columns, (float)a.eps);
    const float *const again = adds ? sum : x;  // each thread reads what it has written itself
    const i64 step = adds ? 1 : a.step;
    each_column<PAIRS>(
        columns, [&](i64 c) { return make_float2(again[c * step], a.w[c * a.w_step]); },
        [&](i64 c, float2 both) { out[c] = both.x * factor * both.y; });
}
__global__ void A_ROW centred_norm(const __grid_constant__ Rows a) {
    wait_for_earlier();
    SHARED(room, float[32]);
    const i64 *const steps[] = {a.x.step, a.out.step};
    const Places<2> p = places(a.axes, steps, blockIdx.x);
    const float *x = a.x.at + p.at[0];
    float *out = a.out.at + p.at[1];
    const float n = (float)a.columns;
    const float mean = sum_over(a.columns, room, [&](i64 c) { return x[c * a.step]; }) / n;
    const float squares = sum_over(a.columns, room, [&](i64 c) {
        const float d = x[c * a.step] - mean;
        return d * d;
    });
    const float factor = 1.0f / sqrtf(squares / n + (float)a.number);
    each_column(
        a.columns, [&](i64 c) { return x[c * a.step]; }, [&](i64 c, float value) { out[c] = (value - mean) * factor; });
}

// --------------------------------------------------------------------------------------------------- softmax

struct Softmax {
    i64 columns, step, mask_step;
    double scale;
    Axes axes;
    Walk<const float> x;
    Walk<float> out;
    Walk<const float> mask, slopes, sinks;  // null where there is none
};
__global__ void A_ROW softmax(const __grid_constant__ Softmax a) {
    wait_for_earlier();
    SHARED(room, float[32]);
    const i64 *const steps[] = {a.x.step, a.out.step, a.mask.step, a.slopes.step, a.sinks.step};
    const Places<5> p = places(a.axes, steps, blockIdx.x);
    const float *x = a.x.at + p.at[0], *mask = a.mask.at + p.at[2];
    float *out = a.out.at + p.at[1];
    const float scale = (float)a.scale, slope = a.slopes.at ? a.slopes.at[p.at[3]] : 1.0f;
    const float sink = a.sinks.at ? a.sinks.at[p.at[4]] : -INFINITY;
    auto make = [&](auto score) {
        float top = -INFINITY;
        each_column<PAIRS>(a.columns, score, [&](i64, float value) { top = fmaxf(top, value); });
        top = fmaxf(block_max(top, room), sink);
        const float held = top == -INFINITY ? 0.0f : top;  // a row that is masked entirely gives zeros
        const float sum = sum_over<PAIRS>(a.columns, room, [&](i64 c) { return expf(score(c) - held); }) + expf(sink - held);
        const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        each_column<PAIRS>(a.columns, score, [&](i64 c, float value) { out[c] = expf(value - held) * factor; });
    };
    if (a.mask.at)
        make([&](i64 c) { return x[c * a.step] * scale + slope * mask[c * a.mask_step]; });
    else
        make([&](i64 c) { return x[c * a.step] * scale; });
}

// ------------------------------------------------------------------------------------------------------ sums

// The sum of each row times a number.
__global__ void A_ROW sum_rows(const __grid_constant__ Rows a) {
    wait_for_earlier();
    SHARED(room, float[32]);
    const i64 *const steps[] = {a.x.step, a.out.step};
    const Places<2> p = places(a.axes, steps, blockIdx.x);
    const float *x = a.x.at + p.at[0];
    const float sum = sum_over(a.columns, room, [&](i64 c) { return x[c * a.step]; });
    if (threadIdx.x == 0) a.out.at[p.at[1]] = sum * (float)a.number;
}
// Running sums, by one warp.
__global__ void cumsum(const __grid_constant__ Rows a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.out.step};
    const Places<2> p = places(a.axes, steps, blockIdx.x);
    const float *x = a.x.at + p.at[0];
    float *out = a.out.at + p.at[1], before = 0.0f;
    const int lane = threadIdx.x;
    for (i64 start = 0; start < a.columns; start += 32) {
        const bool inside = start + lane < a.columns;
        float sum = inside ? x[(start + lane) * a.step] : 0.0f;
#pragma unroll
        for (int by = 1; by < 32; by <<= 1) {
            const float other = __shfl_up_sync(ALL_LANES, sum, by);
            if (lane >= by) sum += other;
        }
        if (inside) out[start + lane] = before + sum;
        before += __shfl_sync(ALL_LANES, sum, 31);
    }
}
struct CountEqual {
    i64 count;
    const i32 *a, *b;
    i64 *out;
};
__global__ void count_equal(const __grid_constant__ CountEqual a) {  // one block
    wait_for_earlier();
    SHARED(room, i64[32]);
    i64 equal = 0;
    for (i64 i = threadIdx.x; i < a.count; i += blockDim.x) equal += a.a[i] == a.b[i];
#pragma unroll
    for (int by = 16; by > 0; by >>= 1) equal += __shfl_xor_sync(ALL_LANES, equal, by);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = equal;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 w = 1; w < blockDim.x / 32; w++) equal += room[w];
        a.out[0] = equal;
    }
}

// ---------------------------------------------------------------------------------------------------- largest

struct Order {
    i64 columns, step;
    Axes axes;
    Walk<const float> x;
    Walk<i32> out;
};
// The first of the largest entries, of which NaN is one.
__device__ __forceinline__ bool is_above(float x, float y) { return x > y || (x != x && y == y); }
__global__ void A_ROW argmax(const __grid_constant__ Order a) {
    wait_for_earlier();
    SHARED(best, float[32]);
    SHARED(where, i64[32]);
    const i64 *const steps[] = {a.x.step, a.out.step};
    const Places<2> p = places(a.axes, steps, blockIdx.x);
    const float *x = a.x.at + p.at[0];
    float most = -INFINITY;
    i64 at = a.columns;
    each_column(
        a.columns, [&](i64 c) { return x[c * a.step]; },
        [&](i64 c, float value) {
            if (at == a.columns || is_above(value, most)) most = value, at = c;
        });
    auto take = [&](float other, i64 from) {
        if (from < a.columns && (at == a.columns || is_above(other, most) || (!is_above(most, other) && from < at)))
            most = other, at = from;
    };
#pragma unroll
    for (int by = 16; by > 0; by >>= 1) {
        const float other = __shfl_xor_sync(ALL_LANES, most, by);
        const i64 from = __shfl_xor_sync(ALL_LANES, at, by);
        take(other, from);
    }
    if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = most, where[threadIdx.x / 32] = at;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 w = 1; w < blockDim.x / 32; w++) take(best[w], where[w]);
        a.out.at[p.at[1]] = (i32)at;
    }
}
