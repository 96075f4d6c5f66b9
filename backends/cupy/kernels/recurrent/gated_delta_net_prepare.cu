// The gated delta rule by chunks, first part: all that needs no state, for every chunk at once.

// A log decay whose sums have differences, also where it is -infinity: e^-128 is nothing in float32.
__device__ __forceinline__ float bounded(float g) { return g < -128.0f ? -128.0f : g; }

struct Prepare {
    Rows q, k, g, beta;
    char *keys, *heads;  // records [sequence, chunk, head]
    i64 tokens, key_heads, value_heads, run;
    i64 together;  // value heads of a block, all of one key head; of those that decay by channel 1
    double scale;
};

// The threads of a block that prepares: a warp for each 16 rows of K and of Q.
template <int C>
constexpr int PREPARING = 4 * C;

// One chunk and value head while it is prepared: L and X in float32 with rows of C + 4, and the record of the head.
template <int C>
struct Square {
    static constexpr int STEP = C + 4;
    float *L, *X;
    char *record;
    __device__ Square(char *memory) : L((float *)memory), X(L + C * STEP), record((char *)(X + C * STEP)) {}
};

// Two neighbouring elements of a tile of the record, in bfloat16.
template <bool EXACT, int UNITS>
__device__ __forceinline__ void put_pair(char *tile, int part, int row, int column, float x, float y) {
    u32 hi, lo;
    split<EXACT>(x, y, hi, lo);
    char *to = tile + place<UNITS>(row, column / 8) + column % 8 * 2;
    *(u32 *)to = hi;
    if (EXACT) *(u32 *)(to + part) = lo;
}

// The same of a square.
template <bool EXACT>
__device__ __forceinline__ void put_below(char *square, int part, int row, int column, float x, float y) {
    put_pair<EXACT, 2>(square + below(row / 16, column / 16), part, row % 16, column % 16, x, y);
}

// X = (I + L)^-1 where L is strictly lower: 16 x 16 blocks on the diagonal by substitution, one lane for a column; then
// pairs of blocks, X21 = -X22 (L21 X11).  The upper blocks of L are scratch.  Ends with a barrier.
template <int C>
__device__ __forceinline__ void invert(const Square<C> &s) {
    constexpr int STEP = Square<C>::STEP, THREADS_HERE = PREPARING<C>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < C / 16 && lane < 16) {
        float x[16];
        const float *L = s.L + 16 * warp * (STEP + 1);
#pragma unroll
        for (int r = 0; r < 16; r++) {
            x[r] = r == lane ? 1.f : 0.f;
#pragma unroll
            for (int m = 0; m < r; m++) x[r] = fmaf(-L[r * STEP + m], x[m], x[r]);
            s.X[16 * warp * (STEP + 1) + r * STEP + lane] = x[r];
        }
    }
    __syncthreads();
    for (int w = 16; w < C; w *= 2) {
        const int quads = w / 4, each = w * quads, all = C / (2 * w) * each;
        for (int i = threadIdx.x; i < all; i += THREADS_HERE) {
            const int r = i % each / quads, c = i % quads * 4, corner = i / each * 2 * w * (STEP + 1);
            const float *L21 = s.L + corner + w * STEP, *X11 = s.X + corner;
            float4 sum = make_float4(0, 0, 0, 0);
            for (int m = c; m < w; m++) sum = fma4(L21[r * STEP + m], *(const float4 *)(X11 + m * STEP + c), sum);
            *(float4 *)(s.L + corner + w + r * STEP + c) = sum;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < all; i += THREADS_HERE) {
            const int r = i % each / quads, c = i % quads * 4, corner = i / each * 2 * w * (STEP + 1);
            const float *X22 = s.X + corner + w * (STEP + 1), *product = s.L + corner + w;
            float4 sum = make_float4(0, 0, 0, 0);
            for (int m = 0; m <= r; m++) sum = fma4(-X22[r * STEP + m], *(const float4 *)(product + m * STEP + c), sum);
            *(float4 *)(s.X + corner + (w + r) * STEP + c) = sum;
        }
        __syncthreads();
    }
}

// Turn L into X in the record, and write the record out.
template <int C, bool EXACT, class R>
__device__ __forceinline__ void complete(const Square<C> &s, const float *betas, char *out) {
    constexpr int STEP = Square<C>::STEP, THREADS_HERE = PREPARING<C>;
    invert<C>(s);
    constexpr int GROUPS = THREADS_HERE / 128;  // of threads; each thread of one has a pair of its blocks
    const u32 at = GROUPS > 1 ? threadIdx.x % 128 : threadIdx.x;
    const int lane = threadIdx.x % 32, r = at / 32 % 2 * 8 + lane / 4, c = at / 64 * 8 + lane % 4 * 2;
#pragma unroll
    for (int I = 0; I < C / 16; I++)
#pragma unroll
        for (int J = 0; J <= I; J++) {
            if (GROUPS > 1 && (I * (I + 1) / 2 + J) % GROUPS != (int)threadIdx.x / 128) continue;
            const float *x = s.X + (16 * I + r) * STEP + 16 * J + c, *beta = betas + 16 * J + c;
            put_pair<EXACT, 2>(s.record + below(I, J), R::SQUARE, r, c, x[0] * beta[0], x[1] * beta[1]);
        }
    __syncthreads();
    for (int i = threadIdx.x * 16; i < R::HEADS; i += THREADS_HERE * 16) *(uint4 *)(out + i) = *(uint4 *)(s.record + i);
}

// What depends on the key head alone is done once for all value heads of a block.
template <int D, int C, bool EXACT>
__global__ void __launch_bounds__(PREPARING<C>, C > 32 ? 2 - EXACT : EXACT ? 4 : 5) delta_prepare(const __grid_constant__ Prepare a) {
    wait_for_earlier();
    using R = Record<D, C, false, EXACT>;
    constexpr int THREADS_HERE = PREPARING<C>, UNITS = D / 8;
    DYNAMIC_SHARED(keys, char);
    const Square<C> s(keys + R::KEYS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * C;
    const int length = min(C, (int)a.tokens - first);
    const i64 n = blockIdx.z, chunk = n * gridDim.x + blockIdx.x;
    const int key_head = blockIdx.y % (int)a.key_heads, begin = blockIdx.y / (int)a.key_heads * (int)a.together;
    auto head = [&](int i) { return a.run ? key_head * a.run + begin + i : (begin + i) * a.key_heads + key_head; };
    float *gates = (float *)(s.record + R::HEADS);  // of each head sums of log decays, and betas

    // A thread brings four numbers of rows that are `STEP` apart; every eighth row is shuffled alike.
    constexpr int STEP = THREADS_HERE / (D / 4), EACH = C / STEP, WAYS = STEP < 8 ? 8 / STEP : 1;
    const int from = threadIdx.x / (D / 4), c = threadIdx.x % (D / 4) * 4;
    char *to[WAYS];
#pragma unroll
    for (int w = 0; w < WAYS; w++) to[w] = keys + place<UNITS>(from + w * STEP, c / 8) + c % 8 * 2;
    auto bring = [&](const Rows &rows, float scale, int tile) {
        const float *at = rows.row(n, first + from, key_head) + c;
        float4 x[EACH];  // all are asked for before the first is waited for
#pragma unroll
        for (int u = 0; u < EACH; u++, at += STEP * rows.token) {
            x[u] = make_float4(0, 0, 0, 0);
            if (u * STEP + from < length) x[u] = *(const float4 *)at;
        }
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            x[u] *= scale;
            uint2 hi, lo;
            split<EXACT>(x[u].x, x[u].y, hi.x, lo.x);
            split<EXACT>(x[u].z, x[u].w, hi.y, lo.y);
            char *put = to[u % WAYS] + u / WAYS * WAYS * STEP * UNITS * 16 + tile;
            *(uint2 *)put = hi;
            if (EXACT) *(uint2 *)(put + R::TILE) = lo;
        }
    };
    bring(a.k, 1.f, 0);
    bring(a.q, (float)a.scale, R::Q);
    for (int i = warp; i < a.together; i += THREADS_HERE / 32) {
        const i64 h = head(i);
        float before = 0, *G = gates + i * 2 * C;
        for (int t = lane; t < C; t += 32) {
            float sum = t < length ? bounded(*a.g.row(n, first + t, h)) : 0.f;
#pragma unroll
            for (int m = 1; m < 32; m *= 2) {
                const float other = __shfl_up_sync(ALL_LANES, sum, m);
                if (lane >= m) sum += other;
            }
            G[t] = sum + before;
            G[C + t] = t < length ? *a.beta.row(n, first + t, h) : 0.f;
            before += __shfl_sync(ALL_LANES, sum, 31);
        }
    }
    __syncthreads();
    if (begin == 0) {
        char *out = a.keys + (chunk * a.key_heads + key_head) * R::KEYS;
        for (int i = threadIdx.x * 16; i < R::KEYS; i += THREADS_HERE * 16) *(uint4 *)(out + i) = *(uint4 *)(keys + i);
    }

    const bool is_q = warp >= C / 16;
    const int block = warp % (C / 16);
    float scores[C / 8][4];
    clear(scores);
#pragma unroll
    for (int at = 0; at < D; at += 16) {
        const Left f = left_from<EXACT>(keys + is_q * R::Q + by_columns<UNITS>(16 * block, at), R::TILE);
#pragma unroll
        for (int p = 0; p < C / 16; p++)
            if (p <= block)
                multiply_rows<EXACT>(scores[2 * p], scores[2 * p + 1], f, keys + by_rows<UNITS>(16 * p, at), R::TILE);
    }
    for (int i = 0; i < a.together; i++) {
        const float *G = gates + i * 2 * C, *beta = G + C;
        if (i > 0) __syncthreads();  // the record of the head before is written out
        if ((int)threadIdx.x < C) {
            float *factors = (float *)(s.record + R::FACTORS);
            factors[threadIdx.x] = expf(G[threadIdx.x]);
            factors[C + threadIdx.x] = expf(G[C - 1] - G[threadIdx.x]);
        }
#pragma unroll
        for (int j = 0; j < C / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int r = 16 * block + lane / 4 + 4 * e, c = 8 * j + lane % 4 * 2;
                if (j / 2 > block) continue;
                float x = scores[j][e], y = scores[j][e + 1];
                x = r >= c ? x * expf(G[r] - G[c]) : 0.f;
                y = r > c ? y * expf(G[r] - G[c + 1]) : 0.f;
                if (is_q) {
                    put_below<EXACT>(s.record + R::P, R::SQUARE, r, c, x, y);
                } else {
                    s.L[r * Square<C>::STEP + c] = r > c ? beta[r] * x : 0.f;
                    s.L[r * Square<C>::STEP + c + 1] = r > c + 1 ? beta[r] * y : 0.f;
                }
            }
        __syncthreads();
        complete<C, EXACT, R>(s, beta, a.heads + (chunk * a.value_heads + head(i)) * R::HEADS);
    }
}

// With a decay for each channel the exponents cannot be taken out of the products.  Blocks of 16 x 16 scores off the
// diagonal go through their first row n, on tensor cores: (x_r e^(G_r - G_n)) . (k_s e^(G_n - G_s)).  Those on it
// multiply one factor more for each row: eight lanes for a column, a product with K and one with Q.
template <int D, int C, bool EXACT>
__global__ void __launch_bounds__(PREPARING<C>) delta_prepare_channels(const __grid_constant__ Prepare a) {
    wait_for_earlier();
    using R = Record<D, C, true, EXACT>;
    constexpr int THREADS_HERE = PREPARING<C>, STEP = D + 4, QUADS = D / 32;
    DYNAMIC_SHARED(memory, char);
    const Square<C> s(memory);
    float *beta = (float *)(s.record + R::HEADS), *K = beta + C, *Q = K + C * STEP, *decay = Q + C * STEP, *G = decay + C * STEP;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * C;
    const int length = min(C, (int)a.tokens - first);
    const i64 h = blockIdx.y, n = blockIdx.z, key_head = a.run ? h / a.run : h % a.key_heads;
    const i64 record = (n * gridDim.x + blockIdx.x) * a.value_heads + h;

    constexpr int EACH = C * D / 4 / THREADS_HERE, TOGETHER = EACH < 4 ? EACH : 4;
    static_assert(EACH % TOGETHER == 0 && EACH * THREADS_HERE == C * D / 4, "threads share rows evenly");
    for (int from = threadIdx.x; from < C * D / 4; from += TOGETHER * THREADS_HERE) {
        float4 q[TOGETHER], k[TOGETHER], g[TOGETHER];  // all are asked for before the first is waited for
#pragma unroll
        for (int u = 0; u < TOGETHER; u++) {
            const int i = from + u * THREADS_HERE, r = i / (D / 4), c = i % (D / 4) * 4;
            q[u] = k[u] = g[u] = make_float4(0, 0, 0, 0);
            if (r >= length) continue;
            q[u] = *(const float4 *)(a.q.row(n, first + r, key_head) + c);
            k[u] = *(const float4 *)(a.k.row(n, first + r, key_head) + c);
            g[u] = *(const float4 *)(a.g.row(n, first + r, h) + c);
        }
#pragma unroll
        for (int u = 0; u < TOGETHER; u++) {
            const int i = from + u * THREADS_HERE, at = i / (D / 4) * STEP + i % (D / 4) * 4;
            q[u] *= (float)a.scale;
            *(float4 *)(Q + at) = q[u];
            *(float4 *)(K + at) = k[u];
            g[u] = make_float4(bounded(g[u].x), bounded(g[u].y), bounded(g[u].z), bounded(g[u].w));
            *(float4 *)(G + at) = g[u];
            *(float4 *)(decay + at) = make_float4(expf(g[u].x), expf(g[u].y), expf(g[u].z), expf(g[u].w));
        }
    }
    for (int t = threadIdx.x; t < C; t += THREADS_HERE) beta[t] = t < length ? *a.beta.row(n, first + t, h) : 0.f;
    __syncthreads();
    for (int c = threadIdx.x; c < D; c += THREADS_HERE) {
        float sum = 0;
        for (int r = 0; r < C; r++) G[r * STEP + c] = sum += G[r * STEP + c];
        ((float *)(s.record + R::FACTORS))[c] = expf(sum);
    }
    __syncthreads();

    for (int i = threadIdx.x; i < C * D / 2; i += THREADS_HERE) {
        const int r = i / (D / 2), c = i % (D / 2) * 2, at = r * STEP + c;
        const float rise[2] = {expf(G[at]), expf(G[at + 1])};
        const float *last = G + (C - 1) * STEP + c;
        char *to = a.keys + record * R::KEYS;
        put_pair<EXACT, D / 8>(to, R::TILE, r, c, K[at] * rise[0], K[at + 1] * rise[1]);
        put_pair<EXACT, D / 8>(to + R::Q, R::TILE, r, c, Q[at] * rise[0], Q[at + 1] * rise[1]);
        put_pair<EXACT, D / 8>(to + R::RECEIVED, R::TILE, r, c, K[at] * expf(last[0] - G[at]),
                               K[at + 1] * expf(last[1] - G[at + 1]));
    }

    auto put = [&](bool is_q, int r, int c, float x, float y) {  // scores (r, c) and (r, c + 1), c even
        if (is_q) {
            put_below<EXACT>(s.record + R::P, R::SQUARE, r, c, x, y);
        } else {
            s.L[r * Square<C>::STEP + c] = beta[r] * x;
            s.L[r * Square<C>::STEP + c + 1] = beta[r] * y;
        }
    };

    constexpr int WARPS = THREADS_HERE / 32, SIDE = C / 16;
    for (int task = warp; task < SIDE * (SIDE - 1); task += WARPS) {
        const bool is_q = task % 2;
        int I = 1, J = task / 2;
        while (J >= I) J -= I++;
        const float *rows = (is_q ? Q : K) + 16 * I * STEP, *columns = K + 16 * J * STEP;
        const float *row_sums = G + 16 * I * STEP, *column_sums = G + 16 * J * STEP;
        float x[4] = {}, y[4] = {};
        for (int at = 0; at < D; at += 16) {
            Left f;
            u32 hi[4], lo[4] = {};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = at + lane % 4 * 2 + e / 2 * 8, r = (lane / 4 + e % 2 * 8) * STEP + c;
                split<EXACT>(rows[r] * expf(row_sums[r] - row_sums[c]),
                             rows[r + 1] * expf(row_sums[r + 1] - row_sums[c + 1]), f.hi[e], f.lo[e]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = at + lane % 4 * 2 + e % 2 * 8, r = (lane / 4 + e / 2 * 8) * STEP + c;
                split<EXACT>(columns[r] * expf(row_sums[c] - column_sums[r]),
                             columns[r + 1] * expf(row_sums[c + 1] - column_sums[r + 1]), hi[e], lo[e]);
            }
            multiply<EXACT>(x, y, f, hi, lo);
        }
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int r = 16 * I + lane / 4 + 4 * e, c = 16 * J + lane % 4 * 2;
            put(is_q, r, c, x[e], x[e + 1]);
            put(is_q, r, c + 8, y[e], y[e + 1]);
        }
    }

    // Two columns of a diagonal block for each eight lanes.
    const int sub = lane % 8;
    for (int task = warp; task < C / 8; task += WARPS) {
        const int c = 8 * task + lane / 8 * 2, block = 8 * task / 16 * 16;
        float4 w[2][QUADS];
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < QUADS; i++) w[j][i] = *(const float4 *)(K + (c + j) * STEP + 4 * (8 * i + sub));
        for (int r = block; r < block + 16; r++) {
            float with_k[2] = {}, with_q[2] = {};
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                const int at = r * STEP + 4 * (8 * i + sub);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    if (r > c + j) w[j][i] *= *(const float4 *)(decay + at);
                    with_k[j] = dot(w[j][i], *(const float4 *)(K + at), with_k[j]);
                    with_q[j] = dot(w[j][i], *(const float4 *)(Q + at), with_q[j]);
                }
            }
#pragma unroll
            for (int m = 4; m; m /= 2)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    with_k[j] += __shfl_xor_sync(ALL_LANES, with_k[j], m);
                    with_q[j] += __shfl_xor_sync(ALL_LANES, with_q[j], m);
                }
            if (sub == 0) {
                put(false, r, c, r > c ? with_k[0] : 0.f, r > c + 1 ? with_k[1] : 0.f);
                put(true, r, c, r >= c ? with_q[0] : 0.f, r > c ? with_q[1] : 0.f);
            }
        }
    }
    __syncthreads();
    complete<C, EXACT, R>(s, beta, a.heads + record * R::HEADS);
}
