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

struct DeltaInputs {
    DeltaSources from;
    float *q, *k, *g, *strength;  // dense [sequence, token, head(, D)]
    Rows v;
};

// All that the delta rule reads, in one pass.  Heads lie along y, the gates behind the last one, in one block, or in a block
// for each value head, which makes its logits too; a group of lanes takes a head through RUN tokens.
template <int D>
__global__ void __launch_bounds__(THREADS, 3) delta_inputs(const __grid_constant__ DeltaInputs a) {
    static_assert(Head<D>::QUADS == 1, "four channels of a lane are all that its head has there");
    constexpr int LANES = Head<D>::LANES;
    const DeltaSources &from = a.from;
    const int lane = threadIdx.x % LANES, tokens = (int)from.tokens, first = blockIdx.x * RUN;
    const int last = min(first + RUN, tokens);
    const i64 n = blockIdx.z, head = (i64)blockIdx.y * (THREADS / LANES) + threadIdx.x / LANES;
    const bool is_there = head < 2 * from.key_heads + from.value_heads, computes = from.products.columns > 0;
    const i64 gate_head = (i64)blockIdx.y - gridDim.y + (computes ? from.value_heads : 1);  // or below 0
    const bool makes_gates = gate_head >= 0;
    const i64 mine = is_there ? head : 0;  // lanes of no head go along, since sums need all lanes
    const i64 channel = mine * D + 4 * lane;
    if (first == 0 && makes_gates) {
        if (threadIdx.x < from.value_heads) prefetch(from.a + threadIdx.x), prefetch(from.dt + threadIdx.x);
        from.ask_for_gates(gate_head);
    } else if (first == 0) {
        from.ask_for_channels(n, channel);
    }
    wait_for_earlier();
    auto put_gates = [&](i64 t, i64 h, float2 logits) {
        const i64 at = (n * tokens + t) * from.value_heads + h;
        const float2 gates = from.gates(n, t, h, logits);
        a.g[at] = gates.x, a.strength[at] = gates.y;
    };
    if (makes_gates && computes) {
        SHARED(room, float[32]);
        for (int t = first; t < last; t++) {
            const float2 logits = from.computed_logits(n, t, gate_head, room);
            if (threadIdx.x == 0) put_gates(t, gate_head, logits);
        }
        return;
    }
    if (makes_gates) {
        for (i64 i = threadIdx.x; i < (last - first) * from.value_heads; i += THREADS) {
            const i64 t = first + i / from.value_heads, h = i % from.value_heads;
            put_gates(t, h, from.stored_logits(n, t, h));
        }
        return;
    }
    const bool is_q = mine < from.key_heads, is_v = mine >= 2 * from.key_heads;
    const i64 own = is_q ? mine : is_v ? mine - 2 * from.key_heads : mine - from.key_heads;
    const i64 step = is_v ? a.v.token : from.key_heads * D;
    float *out = is_v ? a.v.row(n, 0, own) : (is_q ? a.q : a.k) + (n * tokens * from.key_heads + own) * D;
    from.template convolve<D>(n, first, last, channel, !is_v, first == 0 && is_there, [&](int t, float4 y) {
        if (is_there) *(float4 *)(out + t * step + 4 * lane) = y;
    });
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
    const i64 all = a.sequences * a.tokens * a.heads, mine = (i64)blockIdx.x * (THREADS / H::LANES) + threadIdx.x / H::LANES;
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
