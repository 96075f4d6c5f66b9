// What surrounds the gated delta rule in a layer: the short causal convolution before it, alone or with all that happens
// to its result, and the gated norm behind it.  All of it is bound by memory: rows are read once, results written once.

constexpr int THREADS = 256;
// Tokens that a thread convolves one after the other; the rows before the first are read again by the next run.
constexpr int RUN = 16;

struct Convolution {
    Rows x, out;  // [sequence, row, -, channel]
    const float *w;  // [channels, taps]
    i64 w_channel, w_tap, tokens, channels, taps;
};

// out[t, c] = sum over j of w[c, j] x[t + j, c].
__global__ void __launch_bounds__(THREADS) short_convolution(const __grid_constant__ Convolution a) {
    wait_for_earlier();
    const i64 c = (i64)blockIdx.x * THREADS + threadIdx.x, first = (i64)blockIdx.y * RUN, n = blockIdx.z;
    if (c >= a.channels) return;
    const float *x = a.x.row(n, first, 0) + c * a.x.element, *w = a.w + c * a.w_channel;
    float *out = a.out.row(n, first, 0) + c * a.out.element;
    const int count = (int)min((i64)RUN, a.tokens - first), taps = (int)a.taps;
    if (taps == 4) {
        const float w0 = w[0], w1 = w[a.w_tap], w2 = w[2 * a.w_tap], w3 = w[3 * a.w_tap];
        float x0 = x[0], x1 = x[a.x.token], x2 = x[2 * a.x.token];
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            const float x3 = x[(t + 3) * a.x.token];
            out[t * a.out.token] = fmaf(w0, x0, fmaf(w1, x1, fmaf(w2, x2, w3 * x3)));
            x0 = x1, x1 = x2, x2 = x3;
        }
        return;
    }
    for (int t = 0; t < count; t++) {
        float sum = 0;
        for (int j = 0; j < taps; j++) sum = fmaf(w[j * a.w_tap], x[(t + j) * a.x.token], sum);
        out[t * a.out.token] = sum;
    }
}

// Lanes that hold one head of D channels, four at a time.
template <int D>
struct Head {
    static constexpr int QUADS = D > 128 ? D / 128 : 1, LANES = D / 4 / QUADS, PER_BLOCK = THREADS / LANES;
    static_assert(LANES * QUADS * 4 == D, "a head is shared evenly");
    static __device__ __forceinline__ float sum(float x) {
#pragma unroll
        for (int m = LANES / 2; m; m /= 2) x += __shfl_xor_sync(ALL_LANES, x, m);
        return x;
    }
};

// What makes the logits of gates: rows of x times one row of weights for each value head.
struct GateProducts {
    const float *x;
    i64 x_step, columns;  // 0 columns: logits lie in memory
    const float *alpha, *beta;
};
struct DeltaInputs {
    Rows x;                  // [sequence, token, -, channel]: q heads, k heads, v heads side by side
    Rows alpha, beta;        // [sequence, token, group, value head of the group]
    i64 of_group;            // value heads
    const float *w;          // [channels, 4]
    const float *valid;      // [sequence, token], or null: 0 for padding, which leaves the state alone
    const float *a, *dt;     // [value heads]
    const float *old;        // [sequences, 3, channels]: the rows before the first
    const int *ids;          // [sequences, 3]: which rows are kept, 0 for the first of `old`; null: the last ones
    float *kept, *saved;     // those rows, dense, may be `old`; and what `old` was, or null
    float *q, *k, *g, *strength;  // dense [sequence, token, head(, D)]
    Rows v;
    Fault fault;
    i64 tokens, key_heads, value_heads;
    double eps;
    GateProducts products;
};

// Convolution with four taps, SiLU, keys and queries of length one, gates: all that the delta rule reads, in one pass.
// Heads lie along y, the gates behind the last one, in one block, or in a block for each value head, which makes its logits
// too; a group of lanes takes a head through RUN tokens.
template <int D>
__global__ void __launch_bounds__(THREADS, 3) delta_inputs(const __grid_constant__ DeltaInputs a) {
    static_assert(Head<D>::QUADS == 1, "four channels of a lane are all that its head has there");
    using H = Head<D>;
    const int lane = threadIdx.x % H::LANES, tokens = (int)a.tokens, first = blockIdx.x * RUN;
    const int last = min(first + RUN, tokens);
    const i64 n = blockIdx.z, head = (i64)blockIdx.y * H::PER_BLOCK + threadIdx.x / H::LANES;
    const i64 heads = 2 * a.key_heads + a.value_heads, channels = heads * D;
    const bool is_there = head < heads;
    const GateProducts &p = a.products;
    const i64 gate_head = (i64)blockIdx.y - gridDim.y + (p.columns ? a.value_heads : 1);  // or below 0
    const bool makes_gates = gate_head >= 0;
    const i64 mine = is_there ? head : 0;  // lanes of no head go along, since sums need all lanes
    const i64 channel = mine * D + 4 * lane;
    if (first == 0 && makes_gates) {
        if (threadIdx.x < a.value_heads) prefetch(a.a + threadIdx.x), prefetch(a.dt + threadIdx.x);
        for (i64 c = threadIdx.x * (LINE / 4); c < p.columns; c += THREADS * (LINE / 4))
            prefetch(p.alpha + gate_head * p.columns + c), prefetch(p.beta + gate_head * p.columns + c);
    } else if (first == 0) {
        prefetch(a.w + 4 * channel);
        for (int i = 0; i < 3; i++) prefetch(a.old + (n * 3 + i) * channels + channel);
    }
    wait_for_earlier();
    auto put_gates = [&](i64 t, i64 h, float alpha, float beta) {
        const i64 at = (n * tokens + t) * a.value_heads + h;
        const float x = alpha + a.dt[h], valid = a.valid ? a.valid[n * tokens + t] : 1.0f;
        a.g[at] = a.a[h] * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))) * valid;
        a.strength[at] = valid / (1.0f + expf(-beta));
    };
    if (makes_gates && p.columns) {
        SHARED(room, float[32]);
        const int columns = (int)p.columns;
        const float *w_alpha = p.alpha + gate_head * p.columns, *w_beta = p.beta + gate_head * p.columns;
        for (int t = first; t < last; t++) {
            const float *x = p.x + (n * tokens + t) * p.x_step;
            float alpha = 0.0f, beta = 0.0f;
#pragma unroll 2
            for (int c = 4 * threadIdx.x; c < columns; c += 4 * THREADS) {
                const float4 v = *(const float4 *)(x + c);
                alpha = dot(v, *(const float4 *)(w_alpha + c), alpha), beta = dot(v, *(const float4 *)(w_beta + c), beta);
            }
            alpha = block_sum(alpha, room), beta = block_sum(beta, room);
            if (threadIdx.x == 0) put_gates(t, gate_head, alpha, beta);
        }
        return;
    }
    if (makes_gates) {
        for (i64 i = threadIdx.x; i < (last - first) * a.value_heads; i += THREADS) {
            const i64 t = first + i / a.value_heads, h = i % a.value_heads, group = h / a.of_group, within = h % a.of_group;
            put_gates(t, h, a.alpha.row(n, t, group)[within * a.alpha.element], a.beta.row(n, t, group)[within * a.beta.element]);
        }
        return;
    }
    const bool is_q = mine < a.key_heads, is_v = mine >= 2 * a.key_heads;
    const i64 own = is_q ? mine : is_v ? mine - 2 * a.key_heads : mine - a.key_heads;
    const i64 step = is_v ? a.v.token : a.key_heads * D;
    float *out = is_v ? a.v.row(n, 0, own) : (is_q ? a.q : a.k) + (n * tokens * a.key_heads + own) * D;
    auto row = [&](int t) {
        if (t < 0) return *(const float4 *)(a.old + (n * 3 + t + 3) * channels + channel);
        return *(const float4 *)(a.x.row(n, t, 0) + channel);
    };
    float4 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = *(const float4 *)(a.w + 4 * (channel + i));
    float4 x0 = row(first - 3), x1 = row(first - 2), x2 = row(first - 1);
    if (first == 0 && is_there) {  // who reads the old rows writes the new ones, so that they may be the same
        float4 rows[3];
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int id = a.ids ? a.ids[3 * n + i] : tokens + i;
            const bool is_row = id >= 0 && id < tokens + 3;
            if (!is_row && mine == 0 && lane == 0) note_fault(a.fault, id);
            rows[i] = row(is_row ? id - 3 : -1);
            if (a.saved) *(float4 *)(a.saved + (n * 3 + i) * channels + channel) = row(i - 3);
        }
#pragma unroll
        for (int i = 0; i < 3; i++) *(float4 *)(a.kept + (n * 3 + i) * channels + channel) = rows[i];
    }
#pragma unroll 4
    for (int t = first; t < last; t++) {
        const float4 x3 = *(const float4 *)(a.x.row(n, t, 0) + channel);
        float4 y;
        y.x = silu(fmaf(w[0].x, x0.x, fmaf(w[0].y, x1.x, fmaf(w[0].z, x2.x, w[0].w * x3.x))));
        y.y = silu(fmaf(w[1].x, x0.y, fmaf(w[1].y, x1.y, fmaf(w[1].z, x2.y, w[1].w * x3.y))));
        y.z = silu(fmaf(w[2].x, x0.z, fmaf(w[2].y, x1.z, fmaf(w[2].z, x2.z, w[2].w * x3.z))));
        y.w = silu(fmaf(w[3].x, x0.w, fmaf(w[3].y, x1.w, fmaf(w[3].z, x2.w, w[3].w * x3.w))));
        const float square = H::sum(dot(y, y, 0.0f));
        if (!is_v) y *= 1.0f / sqrtf(square + (float)a.eps);
        if (is_there) *(float4 *)(out + t * step + 4 * lane) = y;
        x0 = x1, x1 = x2, x2 = x3;
    }
}

struct GatedNorm {
    Rows x, z, out;  // [sequence, token, head, D]
    const float *w;  // [D]
    i64 sequences, tokens, heads;
    double eps;
};

// out = x / sqrt(mean(x^2) + eps) w silu(z), a group of lanes for each row.
template <int D>
__global__ void __launch_bounds__(THREADS) gated_norm(const __grid_constant__ GatedNorm a) {
    using H = Head<D>;
    const int lane = threadIdx.x % H::LANES;
    const i64 all = a.sequences * a.tokens * a.heads, mine = (i64)blockIdx.x * H::PER_BLOCK + threadIdx.x / H::LANES;
    const i64 i = mine < all ? mine : 0, h = i % a.heads, t = i / a.heads % a.tokens, n = i / (a.heads * a.tokens);
    const float *from = a.x.row(n, t, h), *gates = a.z.row(n, t, h);
    float *out = a.out.row(n, t, h);
    if (blockIdx.x == 0) prefetch(a.w + 4 * lane);
    wait_for_earlier();
    float4 x[H::QUADS], z[H::QUADS], w[H::QUADS];  // all are asked for before the first is waited for
#pragma unroll
    for (int c = 0; c < H::QUADS; c++) {
        const int e = 4 * (c * H::LANES + lane);
        x[c] = *(const float4 *)(from + e);
        if (mine < all) z[c] = *(const float4 *)(gates + e), w[c] = *(const float4 *)(a.w + e);
    }
    float square = 0;
#pragma unroll
    for (int c = 0; c < H::QUADS; c++) square = dot(x[c], x[c], square);
    const float factor = 1.0f / sqrtf(H::sum(square) / D + (float)a.eps);
    if (mine >= all) return;
#pragma unroll
    for (int c = 0; c < H::QUADS; c++) {
        x[c] *= factor;
        x[c] *= w[c];
        x[c] *= make_float4(silu(z[c].x), silu(z[c].y), silu(z[c].z), silu(z[c].w));
        *(float4 *)(out + 4 * (c * H::LANES + lane)) = x[c];
    }
}
