// Products of matrices whose weights are kept as float32, half or bfloat16; triangular systems.

// out[m, n] = sum over k of x[m, k] w[n, k], for each entry of the leading axes.
template <class T> struct Product {
    i64 m, n, k, w_step, w_column, x_step, x_column;  // strides of rows, and of entries within them
    i64 run, splits;                                  // entries of k that a block adds up, and blocks that share them
    float *parts;                                     // what these leave: [matrices, splits, m, n]
    Axes axes;                                        // leading
    Walk<const T> w;
    Walk<const float> x;
    Walk<float> out;  // dense matrices
};
// For few rows of x: one warp for each row of w, and up to `ROWS` rows of x.
constexpr int ROWS = 4;
template <class T> __global__ void __launch_bounds__(128) matvec(const __grid_constant__ Product<T> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.w.step, a.x.step, a.out.step};
    const Places<3> p = places(a.axes, steps, blockIdx.z);
    const i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32, first = (i64)blockIdx.y * ROWS;
    const int lane = threadIdx.x % 32;
    if (row >= a.n) return;  // a whole warp
    const T *w = a.w.at + p.at[0] + row * a.w_step;
    const float *x = a.x.at + p.at[1] + first * a.x_step;
    const int rows = (int)min((i64)ROWS, a.m - first);
    float sum[ROWS] = {};
    for (i64 c = lane; c < a.k; c += 32) {
        const float value = to_float(w[c * a.w_column]);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < rows) sum[r] += value * x[r * a.x_step + c * a.x_column];
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;  // a whole warp
        const float total = warp_sum(sum[r]);
        if (lane == 0) a.out.at[p.at[2] + (first + r) * a.n + row] = total;
    }
}
// For few columns of w whose rows neighbour each other: a thread for each row of w.
template <class T> __global__ void __launch_bounds__(128) across(const __grid_constant__ Product<T> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.w.step, a.x.step, a.out.step};
    const Places<3> p = places(a.axes, steps, blockIdx.z);
    const i64 row = (i64)blockIdx.x * 128 + threadIdx.x, first = (i64)blockIdx.y * ROWS;
    if (row >= a.n) return;
    const T *w = a.w.at + p.at[0] + row * a.w_step;
    const float *x = a.x.at + p.at[1] + first * a.x_step;
    const int rows = (int)min((i64)ROWS, a.m - first);
    float sum[ROWS] = {};
#pragma unroll 8
    for (i64 c = 0; c < a.k; c++) {
        const float value = to_float(w[c * a.w_column]);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < rows) sum[r] += value * x[r * a.x_step + c * a.x_column];
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (r < rows) a.out.at[p.at[2] + (first + r) * a.n + row] = sum[r];
}
// R columns of a row from column `c`, zeros from `end` on.
template <class T, int R> __device__ __forceinline__ void load_part(float (&to)[R], const T *row, i64 step, i64 c, i64 end) {
    if constexpr (sizeof(T) == 4)
        if (step == 1 && c + R <= end && ((u64)(row + c) & 15) == 0) {
#pragma unroll
            for (int i = 0; i < R; i += 4) {
                const float4 v = *(const float4 *)(row + c + i);
                to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
            }
            return;
        }
#pragma unroll
    for (int i = 0; i < R; i++) to[i] = c + i < end ? to_float(row[(c + i) * step]) : 0.0f;
}
// A block makes HIGH x WIDE entries, or its part of their sums; a thread 4 x 8 of them, in fours.  Each thread brings some
// columns of a row of x and of one of w, and those of the next stage while it multiplies.
constexpr int DEPTH = 16, HIGH = 64, WIDE = 128, BANKS = 4;  // rows that are written together lie in different banks
template <class T> __global__ void __launch_bounds__(256, 2) matmul(const __grid_constant__ Product<T> a) {
    wait_for_earlier();
    constexpr int OF_X = DEPTH * HIGH / 256, OF_W = DEPTH * WIDE / 256;
    SHARED(xs, float[DEPTH][HIGH + BANKS]);
    SHARED(ws, float[DEPTH][WIDE + BANKS]);
    const i64 *const steps[] = {a.w.step, a.x.step, a.out.step};
    const Places<3> p = places(a.axes, steps, blockIdx.z / (u32)a.splits);
    const i64 n0 = (i64)blockIdx.x * WIDE, m0 = (i64)blockIdx.y * HIGH, k0 = blockIdx.z % a.splits * a.run, end = min(k0 + a.run, a.k);
    const int x_row = threadIdx.x * OF_X / DEPTH, x_column = threadIdx.x * OF_X % DEPTH;
    const int w_row = threadIdx.x * OF_W / DEPTH, w_column = threadIdx.x * OF_W % DEPTH;
    const int down = threadIdx.x / 16 * 4, right = threadIdx.x % 16 * 4;
    const T *w = a.w.at + p.at[0] + min(n0 + w_row, a.n - 1) * a.w_step;
    const float *x = a.x.at + p.at[1] + min(m0 + x_row, a.m - 1) * a.x_step;
    float sum[4][8] = {}, next_x[OF_X], next_w[OF_W];
    load_part<float, OF_X>(next_x, x, a.x_column, k0 + x_column, end);
    load_part<T, OF_W>(next_w, w, a.w_column, k0 + w_column, end);
    for (i64 k = k0; k < end; k += DEPTH) {
#pragma unroll
        for (int i = 0; i < OF_X; i++) xs[x_column + i][x_row] = next_x[i];
#pragma unroll
        for (int i = 0; i < OF_W; i++) ws[w_column + i][w_row] = next_w[i];
        __syncthreads();
        if (k + DEPTH < end) {
            load_part<float, OF_X>(next_x, x, a.x_column, k + DEPTH + x_column, end);
            load_part<T, OF_W>(next_w, w, a.w_column, k + DEPTH + w_column, end);
        }
#pragma unroll 4
        for (int d = 0; d < DEPTH; d++) {
            const float4 u = *(const float4 *)&xs[d][down], v = *(const float4 *)&ws[d][right], z = *(const float4 *)&ws[d][64 + right];
            const float us[4] = {u.x, u.y, u.z, u.w}, vs[8] = {v.x, v.y, v.z, v.w, z.x, z.y, z.z, z.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] = fmaf(us[i], vs[j], sum[i][j]);
        }
        __syncthreads();
    }
    float *out = a.splits > 1 ? a.parts + (i64)blockIdx.z * a.m * a.n : a.out.at + p.at[2];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const i64 m = m0 + down + i, n = n0 + j / 4 * 64 + right + j % 4;
            if (m < a.m && n < a.n) out[m * a.n + n] = sum[i][j];
        }
}
// The parts of each sum, in order.
struct Parts {
    i64 count, splits;  // entries of a matrix
    const float *parts;
    Axes axes;
    Walk<float> out;
};
__global__ void add_parts(const __grid_constant__ Parts a) {
    wait_for_earlier();
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const i64 *const steps[] = {a.out.step};
    const Places<1> p = places(a.axes, steps, blockIdx.y);
    const float *parts = a.parts + blockIdx.y * a.splits * a.count + i;
    float sum = 0.0f;
    for (i64 s = 0; s < a.splits; s++) sum += parts[s * a.count];
    a.out.at[p.at[0] + i] = sum;
}

// a x = b for lower triangles a; a thread for each column of b.
struct Triangular {
    i64 count, n, m, a_step, a_column, b_step, b_column;
    Axes axes;
    Walk<const float> a, b;
    Walk<float> out;  // dense
};
__global__ void solve_triangular(const __grid_constant__ Triangular t) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= t.count) return;
    const i64 *const steps[] = {t.a.step, t.b.step, t.out.step};
    const Places<3> p = places(t.axes, steps, i / (u32)t.m);
    const i64 column = i % (u32)t.m;
    const float *a = t.a.at + p.at[0], *b = t.b.at + p.at[1] + column * t.b_column;
    float *out = t.out.at + p.at[2] + column;
    for (i64 r = 0; r < t.n; r++) {
        float rest = b[r * t.b_step];
        for (i64 c = 0; c < r; c++) rest -= a[r * t.a_step + c * t.a_column] * out[c * t.m];
        out[r * t.m] = rest / a[r * t.a_step + r * t.a_column];
    }
}
