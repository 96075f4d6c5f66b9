// The gated delta rule token by token: for decoding and short prompts, in place if asked.
//
// Rows of a state are value channels, contiguous over the keys.  LANES lanes of a warp share a row, each lane holds
// ROWS rows: a warp keeps 32 / LANES * ROWS rows in registers for all tokens.  Both products of a token use the old
// state, so that one reduction serves the delta and the output:
//     a = S k, b = S q:   delta = beta (v - e^g a),   o = (e^g b + delta (k.q)) / sqrt(d),   S = e^g S + delta k^T.

struct DeltaNet {
    Rows q, k, v, g, beta, out;
    Beginning from;
    States kept;
    Fault fault;
    i64 tokens, key_heads, value_heads, run, key_size, value_size;  // run: neighbouring heads that share a key; 0: tiled
    i64 snapshots, stored;        // of sequence n, snapshot s is kept state n * snapshots + s; `stored` of them are written
    i64 tile;                     // tokens brought to shared memory together
    double scale;
    float *saved;  // the old states, if they are asked for; sequence n begins with state n then
    Inputs::Words inputs;
};

constexpr int THREADS = 128;

// Four elements of a row of which `left` exist.
template <bool WHOLE>
__device__ __forceinline__ float4 load_some(const float *row, i64 left, i64 step) {
    if (WHOLE) return *(const float4 *)row;
    return make_float4(left > 0 ? row[0] : 0.f, left > 1 ? row[step] : 0.f, left > 2 ? row[2 * step] : 0.f,
                       left > 3 ? row[3 * step] : 0.f);
}
template <bool WHOLE>
__device__ __forceinline__ void store_some(float *row, float4 x, i64 left) {
    if (WHOLE) {
        store_stream((float4 *)row, x);
        return;
    }
    if (left > 0) row[0] = x.x;
    if (left > 1) row[1] = x.y;
    if (left > 2) row[2] = x.z;
    if (left > 3) row[3] = x.w;
}

// What the threads of a block share of one token, in floats: q, k, decay, v of the block's rows, and two scalars.
template <int D, bool CHANNELS, int BLOCK_ROWS>
struct Token {
    static constexpr int K = D, DECAY = 2 * D, V = DECAY + (CHANNELS ? D : 0), SCALARS = V + BLOCK_ROWS, SIZE = SCALARS + 4;
};

// Begin to bring `count` tokens from `first` to `stage`.  What needs no arithmetic is copied asynchronously.
template <class T, int D, bool CHANNELS, bool WHOLE>
__device__ __forceinline__ void fetch(const DeltaNet &a, float *stage, i64 n, i64 h, i64 key_head, int row0, int first,
                                      int count) {
    constexpr int QUADS = T::SCALARS / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * QUADS; i += THREADS) {
        const int t = i / QUADS, c = i % QUADS * 4;
        const bool is_v = c >= T::V, is_decay = CHANNELS && c >= T::DECAY && !is_v;
        const Rows &x = is_v ? a.v : is_decay ? a.g : c >= T::K ? a.k : a.q;
        const int begin = is_v ? T::V : is_decay ? T::DECAY : c >= T::K ? T::K : 0;
        const i64 e = is_v ? row0 + c - begin : c - begin, left = (is_v ? a.value_size : a.key_size) - e;
        const float *from = x.row(n, first + t, is_v || is_decay ? h : key_head) + e * x.element;
        float4 *to = (float4 *)(stage + t * T::SIZE + c);
        if (WHOLE && left > 0)
            cp_async_16(to, from);
        else
            *to = load_some<false>(from, left, x.element);
    }
    cp_async_commit();
}

// Make decays of log decays.  Each thread touches only what it brought itself.
template <class T, bool CHANNELS>
__device__ __forceinline__ void finish(float *stage, int count, float g, float beta) {
    cp_async_wait<0>();
    if (CHANNELS) {
        constexpr int QUADS = T::SCALARS / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < count * QUADS; i += THREADS) {
            const int t = i / QUADS, c = i % QUADS * 4;
            if (c < T::DECAY || c >= T::V) continue;
            float4 &x = *(float4 *)(stage + t * T::SIZE + c);
            x = make_float4(expf(x.x), expf(x.y), expf(x.z), expf(x.w));
        }
    }
    if ((int)threadIdx.x < count) {
        float *scalars = stage + threadIdx.x * T::SIZE + T::SCALARS;
        scalars[0] = expf(g), scalars[1] = beta;
    }
}

// Of a multiprocessor.
constexpr int blocks_of(int keys, bool channels, int rows) {
    return keys > 128 || Inputs::COMPUTES ? 4 : !channels ? 6 : rows > 1 && SPILLS_SOONER ? 5 : 7;
}
template <int D, bool CHANNELS, bool WHOLE, int LANES, int ROWS, bool COMPUTES = false>
__global__ void __launch_bounds__(THREADS, blocks_of(D, CHANNELS, ROWS)) delta_net(const __grid_constant__ DeltaNet a) {
    constexpr int QUADS = D / LANES / 4, WARP_ROWS = 32 / LANES * ROWS, BLOCK_ROWS = THREADS / 32 * WARP_ROWS;
    using T = Token<D, CHANNELS, BLOCK_ROWS>;
    static_assert(COMPUTES == Inputs::COMPUTES, "the name of the kernel says what it computes");
    static_assert(QUADS * LANES * 4 == D && ROWS <= LANES, "a lane holds whole quads and stores at most one output");
    DYNAMIC_SHARED(shared, float);
    const int lane = threadIdx.x % 32, sub = lane % LANES, row0 = blockIdx.x * BLOCK_ROWS;
    const int row = row0 + threadIdx.x / 32 * WARP_ROWS + lane / LANES * ROWS;
    const i64 n = blockIdx.z, h = blockIdx.y, key_head = a.run ? h / a.run : h % a.key_heads;
    const i64 state_size = a.value_heads * a.value_size * a.key_size;
    const int inside = (int)((h * a.value_size + row) * a.key_size);  // of a state, this lane's first row
    if (WHOLE && !a.from.old.slots && row < a.value_size) {  // most begin with the old state; they read it when it is there
        const float *from = a.from.old.at + n * a.from.step * state_size + inside;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            for (int line = sub * LINE / 4; line < D; line += LANES * LINE / 4) prefetch(from + r * D + line);
    }
    Inputs::ask<D>(a.inputs, n, h, key_head, row0);
    wait_for_earlier();

    if (!has_states(a.from, a.kept, n, n * a.snapshots, a.stored, a.fault)) return;
    const float *old = a.from.at(n, state_size);

    const int tokens = (int)a.tokens, tile = (int)a.tile;
    float g = 0, beta = 0;
    auto begin = [&](int first) {
        const int count = min(tile, tokens - first), at = first / tile & 1;
        if (Inputs::COMPUTES) return Inputs::compute<D, BLOCK_ROWS>(a.inputs, shared, T::SIZE, n, h, key_head, row0, tokens, g, beta);
        fetch<T, D, CHANNELS, WHOLE>(a, shared + at * tile * T::SIZE, n, h, key_head, row0, first, count);
        if ((int)threadIdx.x < count) {
            g = CHANNELS ? 0.f : *a.g.row(n, first + threadIdx.x, h);
            beta = *a.beta.row(n, first + threadIdx.x, h);
        }
    };
    if (!Inputs::COMPUTES && tokens > 0) begin(0);

    float4 S[ROWS][QUADS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < QUADS; c++) {
            const int e = 4 * (c * LANES + sub);
            const float *from = old + inside + r * a.key_size + e;
            if (row + r >= a.value_size)
                S[r][c] = make_float4(0, 0, 0, 0);
            else
                S[r][c] = WHOLE ? load_stream((const float4 *)from) : load_some<false>(from, a.key_size - e, 1);
        }

    auto keep_at = [&](float *states, i64 number) {
        float *to = states + number * state_size + inside;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < QUADS; c++) {
                const int e = 4 * (c * LANES + sub);
                if (row + r < a.value_size) store_some<WHOLE>(to + r * a.key_size + e, S[r][c], a.key_size - e);
            }
    };
    auto keep = [&](i64 snapshot) { keep_at(a.kept.at, a.kept.row(n * a.snapshots + snapshot)); };
    if (a.saved) keep_at(a.saved, n);
    if (tokens == 0) keep(0);
    if (Inputs::COMPUTES) begin(0);  // states are on their way

    for (int first = 0; first < tokens; first += tile) {
        const int count = min(tile, tokens - first);
        const float *stage = shared + (first / tile & 1) * tile * T::SIZE;
        finish<T, CHANNELS>((float *)stage, count, g, beta);
        __syncthreads();  // the stage is complete, and nobody reads the other one any more
        if (first + tile < tokens) begin(first + tile);
#pragma unroll 1
        for (int i = 0; i < count; i++, stage += T::SIZE) {
            const float4 *q = (const float4 *)stage + sub, *k = q + T::K / 4, *d = q + T::DECAY / 4;
            const float decay = CHANNELS ? 1.f : stage[T::SCALARS], strength = stage[T::SCALARS + 1];
            float overlap = 0, with_k[ROWS], with_q[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) with_k[r] = with_q[r] = 0;
#pragma unroll
            for (int c = 0; c < QUADS; c++) {
                const float4 key = k[c * LANES], query = q[c * LANES];
                overlap = dot(key, query, overlap);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    if (CHANNELS) S[r][c] *= d[c * LANES];
                    with_k[r] = dot(S[r][c], key, with_k[r]);
                    with_q[r] = dot(S[r][c], query, with_q[r]);
                }
            }
#pragma unroll
            for (int m = LANES / 2; m; m /= 2) {
                overlap += __shfl_xor_sync(ALL_LANES, overlap, m);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    with_k[r] += __shfl_xor_sync(ALL_LANES, with_k[r], m);
                    with_q[r] += __shfl_xor_sync(ALL_LANES, with_q[r], m);
                }
            }
            float result = 0;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float delta = (stage[T::V + row - row0 + r] - decay * with_k[r]) * strength;
                if (sub == r) result = (float)a.scale * (decay * with_q[r] + delta * overlap);
#pragma unroll
                for (int c = 0; c < QUADS; c++) {
                    if (!CHANNELS) S[r][c] *= decay;
                    S[r][c] = fma4(delta, k[c * LANES], S[r][c]);
                }
            }
            if (sub < ROWS && row + sub < a.value_size) a.out.row(n, first + i, h)[(row + sub) * a.out.element] = result;
            const int back = tokens - 1 - first - i;
            if (back < a.stored) keep(back);
        }
    }
    Inputs::keep<D>(a.inputs, n, key_head);
}
