// Products of matrices whose weights are kept as float32, half or bfloat16; triangular systems.

// out[m, n] = sum over k of x[m, k] w[n, k], for each entry of the leading axes.
template <class T> struct Product {
    i64 m, n, k, w_step, w_column, x_step, x_column;  // strides of rows, and of entries within them
    Axes axes;                                        // leading
    Walk<const T> w;
    Walk<const float> x;
    Walk<float> out;  // dense matrices
};
// For few rows of x: one warp for each row of w, and up to `ROWS` rows of x.
constexpr int ROWS = 4;
template <class T> __global__ void __launch_bounds__(128) matvec(const __grid_constant__ Product<T> a) {
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
// A block makes 64 x 64 entries; a thread 4 x 4 of them, 16 apart.
constexpr int TILE = 64, DEPTH = 16;
template <class T> __global__ void __launch_bounds__(256) matmul(const __grid_constant__ Product<T> a) {
    SHARED(xs, float[DEPTH][TILE + 1]);
    SHARED(ws, float[DEPTH][TILE + 1]);
    const i64 *const steps[] = {a.w.step, a.x.step, a.out.step};
    const Places<3> p = places(a.axes, steps, blockIdx.z);
    const T *w = a.w.at + p.at[0];
    const float *x = a.x.at + p.at[1];
    const i64 n0 = (i64)blockIdx.x * TILE, m0 = (i64)blockIdx.y * TILE;
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    float sum[4][4] = {};
    for (i64 k0 = 0; k0 < a.k; k0 += DEPTH) {
#pragma unroll
        for (int i = 0; i < TILE / 16; i++) {
            const int r = row + 16 * i;
            const bool inside = k0 + column < a.k;
            xs[column][r] = inside && m0 + r < a.m ? x[(m0 + r) * a.x_step + (k0 + column) * a.x_column] : 0.0f;
            ws[column][r] = inside && n0 + r < a.n ? to_float(w[(n0 + r) * a.w_step + (k0 + column) * a.w_column]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] += xs[k][row + 16 * i] * ws[k][column + 16 * j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const i64 m = m0 + row + 16 * i, n = n0 + column + 16 * j;
            if (m < a.m && n < a.n) a.out.at[p.at[2] + m * a.n + n] = sum[i][j];
        }
}

// a x = b for lower triangles a; a thread for each column of b.
struct Triangular {
    i64 count, n, m, a_step, a_column, b_step, b_column;
    Axes axes;
    Walk<const float> a, b;
    Walk<float> out;  // dense
};
__global__ void solve_triangular(const __grid_constant__ Triangular t) {
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
