// The lightning indexer of DeepSeek V3.2, and the hyper-connections of V4.

// out[t, s] = sum over h of weights[t, h] relu(q[t, h] . k[s]) + mask[t, s]: one warp for each (t, s).
struct Indexer {
    i64 count, heads, size, keys;
    i64 q_head, q_step, k_row, k_step, weights_step, mask_step;  // strides; rows of q and weights are walked
    Axes axes;                                                   // leading, and tokens
    Walk<const float> q, k, weights, mask;
    Walk<float> out;
};
__global__ void lightning_indexer(const __grid_constant__ Indexer a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * 4 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (i >= a.count) return;  // a whole warp
    const u32 s = i % (u32)a.keys;
    const i64 *const steps[] = {a.q.step, a.k.step, a.weights.step, a.mask.step, a.out.step};
    const Places<5> p = places(a.axes, steps, i / (u32)a.keys);
    const float *q = a.q.at + p.at[0], *k = a.k.at + p.at[1] + s * a.k_row, *weights = a.weights.at + p.at[2];
    float sum = 0.0f;
    for (i64 h = 0; h < a.heads; h++) {
        float product = 0.0f;
        for (i64 c = lane; c < a.size; c += 32) product += q[h * a.q_head + c * a.q_step] * k[c * a.k_step];
        product = warp_sum(product);
        sum += weights[h * a.weights_step] * (product < 0.0f ? 0.0f : product);
    }
    if (lane == 0) a.out.at[p.at[4] + s] = sum + a.mask.at[p.at[3] + s * a.mask_step];
}

// A thread for each matrix of n x n, which stays in its place in the result meanwhile.
struct Comb {
    i64 count, n, turns, mixes_step, base_step, scale_step;
    double eps;
    Axes axes;
    Walk<const float> mixes;
    Walk<float> out;
    const float *scale, *base;
};
__global__ void hyper_comb(const __grid_constant__ Comb a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const i64 *const steps[] = {a.mixes.step, a.out.step};
    const Places<2> p = places(a.axes, steps, i);
    const float *mixes = a.mixes.at + p.at[0] + 2 * a.n * a.mixes_step, *base = a.base + 2 * a.n * a.base_step;
    float *m = a.out.at + p.at[1];
    const float scale = a.scale[2 * a.scale_step], eps = (float)a.eps;
    const int n = (int)a.n;
    for (int r = 0; r < n; r++) {  // softmax over the rows
        float top = -INFINITY, sum = 0.0f;
        for (int c = r * n; c < r * n + n; c++) top = fmaxf(top, m[c] = mixes[c * a.mixes_step] * scale + base[c * a.base_step]);
        for (int c = r * n; c < r * n + n; c++) sum += m[c] = expf(m[c] - top);
        for (int c = r * n; c < r * n + n; c++) m[c] = m[c] / sum + eps;
    }
    for (i64 turn = 0; turn < a.turns; turn++) {
        for (int r = 0; r < n && turn; r++) {
            float sum = eps;
            for (int c = 0; c < n; c++) sum += m[r * n + c];
            for (int c = 0; c < n; c++) m[r * n + c] /= sum;
        }
        for (int c = 0; c < n; c++) {
            float sum = eps;
            for (int r = 0; r < n; r++) sum += m[r * n + c];
            for (int r = 0; r < n; r++) m[r * n + c] /= sum;
        }
    }
}

// scale times the sum over streams of x[h] weights[h], or of sigmoid(weights[h]).
struct Pre {
    i64 count, streams, gated, x_stream, weights_stream;
    double scale;
    Axes axes;
    Walk<const float> x, weights;
    Walk<float> out;
};
__global__ void hyper_pre(const __grid_constant__ Pre a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const i64 *const steps[] = {a.x.step, a.weights.step, a.out.step};
    const Places<3> p = places(a.axes, steps, i);
    float sum = 0.0f;
    for (i64 h = 0; h < a.streams; h++) {
        const float weight = a.weights.at[p.at[1] + h * a.weights_stream];
        sum += a.x.at[p.at[0] + h * a.x_stream] * (a.gated ? logistic(weight) : weight);
    }
    a.out.at[p.at[2]] = sum * (float)a.scale;
}

// out[to] = x post[to] + sum over from of residual[from] comb[from, to], or + residual[to].  A thread has one element of
// all streams, of which it holds up to N, so that the result may take the memory of the residual; with N = 0 it may not.
struct Post {
    i64 count, streams, residual_stream, post_stream, comb_from, comb_to, out_stream;
    Axes axes;
    Walk<const float> x, residual, post, comb;
    Walk<float> out;
};
template <int N> __global__ void hyper_post(const __grid_constant__ Post a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const i64 *const steps[] = {a.x.step, a.residual.step, a.post.step, a.comb.step, a.out.step};
    const Places<5> p = places(a.axes, steps, i);
    const float x = a.x.at[p.at[0]], *residual = a.residual.at + p.at[1], *comb = a.comb.at + p.at[3];
    float held[N > 0 ? N : 1];
#pragma unroll
    for (int h = 0; h < N; h++) held[h] = h < a.streams ? residual[h * a.residual_stream] : 0.0f;
    for (i64 to = 0; to < a.streams; to++) {
        float sum = x * a.post.at[p.at[2] + to * a.post_stream];
        if (a.comb.at == nullptr) {
            sum += residual[to * a.residual_stream];
        } else if (N > 0) {
#pragma unroll
            for (int from = 0; from < N; from++)
                if (from < a.streams) sum += held[from] * comb[from * a.comb_from + to * a.comb_to];
        } else {
            for (i64 from = 0; from < a.streams; from++)
                sum += residual[from * a.residual_stream] * comb[from * a.comb_from + to * a.comb_to];
        }
        a.out.at[p.at[4] + to * a.out_stream] = sum;
    }
}

// 0 where a token at its position may see a cell, -inf elsewhere.
struct Causal {
    i64 count, cells, window;
    Axes axes;
    Walk<const i32> positions;
    float *out;
};
__global__ void causal_mask(const __grid_constant__ Causal a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const i64 *const steps[] = {a.positions.step};
    const Places<1> p = places(a.axes, steps, i / (u32)a.cells);
    const i64 distance = (i64)a.positions.at[p.at[0]] - i % (u32)a.cells;
    a.out[i] = distance >= 0 && (a.window == 0 || distance < a.window) ? 0.0f : -INFINITY;
}
