// Recurrences with a matrix as state besides the gated delta net: selective state spaces, RWKV 6 and 7, gated linear
// attention.  The state stays in registers for all tokens.

constexpr int WARPS = 8, COLUMN_WARPS = 16;

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// ------------------------------------------------------------------------------- states [heads, value size, key size]

struct ByValue {
    Rows x, dt, b, c;  // of RWKV 7: v, decay, k, r
    Rows in, back;     // of RWKV 7 only: a, b
    Rows out;
    const float *a;    // of a state space: [heads, 1 or key size]
    Beginning from;
    States kept;
    Fault fault;
    i64 tokens, heads, run, value_size, key_size, a_size, snapshots, stored;  // run: heads that share b and c
};

// A warp has one row of a state, a lane every 32nd element of it.
//     state space: S = e^(dt a) S + dt x b^T, y = S c       RWKV 7: S = S diag(decay) + (S a) b^T + v k^T, y = S r
template <int EACH, bool RWKV>
__global__ void __launch_bounds__(32 * WARPS) recurrence_by_value(const __grid_constant__ ByValue a) {
    const int lane = threadIdx.x % 32, d = (int)a.key_size;
    const i64 n = blockIdx.z, h = blockIdx.y, group = h / a.run, row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const i64 state_size = a.heads * a.value_size * d, inside = (h * a.value_size + row) * d;
    if (!has_states(a.from, a.kept, n, n * a.snapshots, a.stored, a.fault) || row >= a.value_size) return;
    const float *old = a.from.at(n, state_size) + inside;
    float S[EACH], rate[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = 32 * j + lane;
        S[j] = i < d ? old[i] : 0.0f;
        rate[j] = !RWKV && i < d ? a.a[h * a.a_size + (a.a_size > 1 ? i : 0)] : 0.0f;
    }
    auto keep = [&](i64 snapshot) {
        float *to = a.kept.at + a.kept.row(n * a.snapshots + snapshot) * state_size + inside;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (32 * j + lane < d) to[32 * j + lane] = S[j];
    };
    if (a.tokens == 0) keep(0);
    for (i64 t = 0; t < a.tokens; t++) {
        const float x = a.x.row(n, t, h)[row * a.x.element];
        const float *b = a.b.row(n, t, group), *c = a.c.row(n, t, group), *decay = a.dt.row(n, t, h);
        const float size = RWKV ? 0.0f : softplus(*decay);
        float read = 0, y = 0;
        if (RWKV) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const int i = 32 * j + lane;
                if (i < d) read = fmaf(S[j], a.in.row(n, t, h)[i * a.in.element], read);
            }
            read = warp_sum(read);
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = 32 * j + lane;
            if (i >= d) continue;
            const float with_b = b[i * a.b.element];
            if (RWKV)
                S[j] = fmaf(S[j], decay[i * a.dt.element], fmaf(read, a.back.row(n, t, h)[i * a.back.element], x * with_b));
            else
                S[j] = fmaf(S[j], expf(size * rate[j]), size * x * with_b);
            y = fmaf(S[j], c[i * a.c.element], y);
        }
        y = warp_sum(y);
        if (lane == 0) a.out.row(n, t, h)[row * a.out.element] = y;
        const i64 back = a.tokens - 1 - t;
        if (back < a.stored) keep(back);
    }
}

// ------------------------------------------------------------------------------- states [heads, key size, value size]

struct ByKey {
    Rows k, v, q, decay;
    Rows out;
    const float *bonus;  // of RWKV 6: [heads, key size]
    const float *old;
    float *kept;
    i64 tokens, heads, key_size, value_size;
    double scale;
};

// A lane has a column of the state, a warp every 16th row; their sums meet in shared memory.
//     RWKV 6: y = (S + (bonus * k) v^T)^T q, S = decay * S + k v^T       attention: S = decay * S + k v^T, y = S^T q
template <int EACH, bool BONUS>
__global__ void __launch_bounds__(32 * COLUMN_WARPS) recurrence_by_key(const __grid_constant__ ByKey a) {
    SHARED(sums, float[COLUMN_WARPS][32]);
    SHARED(token, float[3][COLUMN_WARPS * EACH]);  // k, q, decay
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, keys = (int)a.key_size;
    const i64 n = blockIdx.z, h = blockIdx.y, column = (i64)blockIdx.x * 32 + lane;
    const i64 inside = (n * a.heads + h) * a.key_size * a.value_size + column;
    const bool is_there = column < a.value_size;
    float S[EACH], bonus[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = COLUMN_WARPS * j + warp;
        bonus[j] = BONUS && i < keys ? a.bonus[h * keys + i] : 0.0f;
        S[j] = is_there && i < keys ? a.old[inside + i * a.value_size] : 0.0f;
    }
    for (i64 t = 0; t < a.tokens; t++) {
        if ((int)threadIdx.x < keys) {
            const int i = threadIdx.x;
            token[0][i] = a.k.row(n, t, h)[i * a.k.element];
            token[1][i] = a.q.row(n, t, h)[i * a.q.element];
            token[2][i] = a.decay.row(n, t, h)[i * a.decay.element];
        }
        const float v = is_there ? a.v.row(n, t, h)[column * a.v.element] : 0.0f;
        float y = 0;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = COLUMN_WARPS * j + warp;
            if (i >= keys) continue;
            const float write = token[0][i] * v, before = S[j];
            S[j] = fmaf(before, token[2][i], write);
            y = fmaf(BONUS ? fmaf(bonus[j], write, before) : S[j], token[1][i], y);
        }
        sums[warp][lane] = y;
        __syncthreads();
        if (warp == 0 && is_there) {
            y = 0;
#pragma unroll
            for (int w = 0; w < COLUMN_WARPS; w++) y += sums[w][lane];
            a.out.row(n, t, h)[column * a.out.element] = (float)a.scale * y;
        }
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = COLUMN_WARPS * j + warp;
        if (is_there && i < keys) a.kept[inside + i * a.value_size] = S[j];
    }
}
