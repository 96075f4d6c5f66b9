// What the delta rule of a layer reads, made of what linear layers leave: a convolution with four taps and SiLU, queries and
// keys of length one, gates.

// Lanes that hold one head of D channels, four at a time.
template <int D>
struct Head {
    static constexpr int QUADS = D > 128 ? D / 128 : 1, LANES = D / 4 / QUADS;
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
struct DeltaSources {
    Rows x;                  // [sequence, token, -, channel]: q heads, k heads, v heads side by side
    Rows alpha, beta;        // [sequence, token, group, value head of the group]
    i64 of_group;            // value heads
    const float *w;          // [channels, 4]
    const float *valid;      // [sequence, token], or null: 0 for padding, which leaves the state alone
    const float *a, *dt;     // [value heads]
    const float *old;        // [sequences, 3, channels]: the rows before the first
    const int *ids;          // [sequences, 3]: which rows are kept, 0 for the first of `old`; null: the last ones
    float *kept, *saved;     // those rows, dense, may be `old`; and what `old` was, or null
    Fault fault;
    i64 tokens, key_heads, value_heads, channels;
    double eps;
    GateProducts products;

    // Four channels of token t; before the first those of `old`.
    __device__ __forceinline__ float4 row(i64 n, int t, i64 channel) const {
        if (t < 0) return *(const float4 *)(old + (n * 3 + t + 3) * channels + channel);
        return *(const float4 *)(x.row(n, t, 0) + channel);
    }
    // Who has read the old rows of four channels last writes the new ones, so that they may be the same.
    __device__ __forceinline__ void keep_rows(i64 n, i64 channel) const {
        float4 rows[3];
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int id = ids ? ids[3 * n + i] : (int)tokens + i;
            const bool is_row = id >= 0 && id < tokens + 3;
            if (!is_row && channel == 0) note_fault(fault, id);
            rows[i] = row(n, is_row ? id - 3 : -1, channel);
            if (saved) *(float4 *)(saved + (n * 3 + i) * channels + channel) = row(n, i - 3, channel);
        }
#pragma unroll
        for (int i = 0; i < 3; i++) *(float4 *)(kept + (n * 3 + i) * channels + channel) = rows[i];
    }
    // Four channels of tokens from `first` up to `end`, one after the other, of lanes that have a head of D channels together.
    template <int D, class Put>
    __device__ __forceinline__ void convolve(i64 n, int first, int end, i64 channel, bool is_normed, bool keeps, Put put) const {
        float4 taps[4];
#pragma unroll
        for (int i = 0; i < 4; i++) taps[i] = *(const float4 *)(w + 4 * (channel + i));
        float4 x0 = row(n, first - 3, channel), x1 = row(n, first - 2, channel), x2 = row(n, first - 1, channel);
        if (keeps) keep_rows(n, channel);
#pragma unroll 4
        for (int t = first; t < end; t++) {
            const float4 x3 = *(const float4 *)(x.row(n, t, 0) + channel);
            float4 y;
            y.x = silu(fmaf(taps[0].x, x0.x, fmaf(taps[0].y, x1.x, fmaf(taps[0].z, x2.x, taps[0].w * x3.x))));
            y.y = silu(fmaf(taps[1].x, x0.y, fmaf(taps[1].y, x1.y, fmaf(taps[1].z, x2.y, taps[1].w * x3.y))));
            y.z = silu(fmaf(taps[2].x, x0.z, fmaf(taps[2].y, x1.z, fmaf(taps[2].z, x2.z, taps[2].w * x3.z))));
            y.w = silu(fmaf(taps[3].x, x0.w, fmaf(taps[3].y, x1.w, fmaf(taps[3].z, x2.w, taps[3].w * x3.w))));
            const float square = Head<D>::sum(dot(y, y, 0.0f));
            if (is_normed) y *= 1.0f / sqrtf(square + (float)eps);
            put(t, y);
            x0 = x1, x1 = x2, x2 = x3;
        }
    }
    // The log decay and the learning rate of a head, from its logits.
    __device__ __forceinline__ float2 gates(i64 n, i64 t, i64 h, float2 logits) const {
        const float sum = logits.x + dt[h], is_valid = valid ? valid[n * tokens + t] : 1.0f;
        return make_float2(a[h] * (fmaxf(sum, 0.0f) + log1pf(expf(-fabsf(sum)))) * is_valid, is_valid / (1.0f + expf(-logits.y)));
    }
    __device__ __forceinline__ float2 stored_logits(i64 n, i64 t, i64 h) const {
        const i64 group = h / of_group, within = h % of_group;
        return make_float2(alpha.row(n, t, group)[within * alpha.element], beta.row(n, t, group)[within * beta.element]);
    }
    // By a whole block, every thread of which gets them; `room` is that of `block_sum`.
    __device__ __forceinline__ float2 computed_logits(i64 n, i64 t, i64 h, float *room) const {
        const GateProducts &p = products;
        const float *from = p.x + (n * tokens + t) * p.x_step, *w_alpha = p.alpha + h * p.columns, *w_beta = p.beta + h * p.columns;
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 2
        for (int c = 4 * threadIdx.x; c < (int)p.columns; c += 4 * blockDim.x) {
            const float4 v = *(const float4 *)(from + c);
            sum.x = dot(v, *(const float4 *)(w_alpha + c), sum.x), sum.y = dot(v, *(const float4 *)(w_beta + c), sum.y);
        }
        sum.x = block_sum(sum.x, room), sum.y = block_sum(sum.y, room);
        return sum;
    }
    // Asks for what no launch writes: the weights of four channels, or the weights of a head's gates.
    __device__ __forceinline__ void ask_for_gates(i64 h) const {
        for (i64 c = threadIdx.x * (LINE / 4); c < products.columns; c += blockDim.x * (LINE / 4))
            prefetch(products.alpha + h * products.columns + c), prefetch(products.beta + h * products.columns + c);
    }
    __device__ __forceinline__ void ask_for_channels(i64 n, i64 channel) const {
        prefetch(w + 4 * channel);
        for (int i = 0; i < 3; i++) prefetch(old + (n * 3 + i) * channels + channel);
    }
};
