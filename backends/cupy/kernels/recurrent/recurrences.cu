// Recurrences with a matrix as state besides the gated delta net: selective state spaces, RWKV 6 and 7, gated linear
// attention.  The state stays in registers for all tokens; where EACH is 0, for keys of any size, in memory, where the
// newest one is kept.

constexpr int WARPS = 8, COLUMN_WARPS = 16;

// What a thread has of a state: every `step`th of `count` elements from `first` on, which are `apart` in memory.
template <int EACH, class F>
__device__ __forceinline__ void each(float *held, float *memory, int first, int step, int count, i64 apart, F f) {
    if constexpr (EACH > 0) {
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (first + step * j < count) f(held[j], first + step * j, j);
    } else {
#pragma unroll 1
        for (int i = first; i < count; i += step) f(memory[i * apart], i, 0);
    }
}

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
    wait_for_earlier();
    const int lane = threadIdx.x % 32, d = (int)a.key_size;
    const i64 n = blockIdx.z, h = blockIdx.y, group = h / a.run, row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const i64 state_size = a.heads * a.value_size * d, inside = (h * a.value_size + row) * d;
    if (!has_states(a.from, a.kept, n, n * a.snapshots, a.stored, a.fault) || row >= a.value_size) return;
    const float *old = a.from.at(n, state_size) + inside;
    float *newest = a.kept.at + a.kept.row(n * a.snapshots) * state_size + inside, S[EACH ? EACH : 1];
    auto all = [&](auto f) { each<EACH>(S, newest, lane, 32, d, 1, f); };
    const float *rates = RWKV ? nullptr : a.a + h * a.a_size;
    const int rate_step = a.a_size > 1;
    float rate[EACH ? EACH : 1];
    all([&](float &s, int i, int j) {
        s = old[i];
        if (!RWKV && EACH) rate[j] = rates[i * rate_step];
    });
    auto keep = [&](i64 snapshot) {
        float *to = a.kept.at + a.kept.row(n * a.snapshots + snapshot) * state_size + inside;
        all([&](float s, int i, int) { to[i] = s; });
    };
    if (a.tokens == 0) keep(0);
    for (i64 t = 0; t < a.tokens; t++) {
        const float x = a.x.row(n, t, h)[row * a.x.element];
        const float *b = a.b.row(n, t, group), *c = a.c.row(n, t, group), *decay = a.dt.row(n, t, h);
        const float size = RWKV ? 0.0f : softplus(*decay);
        float read = 0, y = 0;
        if constexpr (RWKV) {
            const float *in = a.in.row(n, t, h);
            all([&](float s, int i, int) { read = fmaf(s, in[i * a.in.element], read); });
            read = warp_sum(read);
        }
        const float *back = RWKV ? a.back.row(n, t, h) : nullptr;
        all([&](float &s, int i, int j) {
            const float with_b = b[i * a.b.element];
            if constexpr (RWKV) s = fmaf(s, decay[i * a.dt.element], fmaf(read, back[i * a.back.element], x * with_b));
            else s = fmaf(s, expf(size * (EACH ? rate[j] : rates[i * rate_step])), size * x * with_b);
            y = fmaf(s, c[i * a.c.element], y);
        });
        y = warp_sum(y);
        if (lane == 0) a.out.row(n, t, h)[row * a.out.element] = y;
        const i64 before = a.tokens - 1 - t;
        if (before < a.stored) keep(before);
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
__global__ void __launch_bounds__(32 * COLUMN_WARPS, EACH > 8 ? 1 : 2) recurrence_by_key(const __grid_constant__ ByKey a) {
    wait_for_earlier();
    SHARED(sums, float[COLUMN_WARPS][32]);
    SHARED(token, float[3][EACH ? COLUMN_WARPS * EACH : 1]);  // k, q, decay
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, keys = (int)a.key_size;
    const i64 n = blockIdx.z, h = blockIdx.y, column = (i64)blockIdx.x * 32 + lane;
    const i64 inside = (n * a.heads + h) * a.key_size * a.value_size + column;
    const bool is_there = column < a.value_size;
    float S[EACH ? EACH : 1], bonus[EACH ? EACH : 1];
    auto all = [&](auto f) {
        each<EACH>(S, a.kept + inside, warp, COLUMN_WARPS, is_there ? keys : 0, a.value_size, f);
    };
    all([&](float &s, int i, int j) {
        s = a.old[inside + i * a.value_size];
        if (BONUS && EACH) bonus[j] = a.bonus[h * keys + i];
    });
    for (i64 t = 0; t < a.tokens; t++) {
        const float *k = a.k.row(n, t, h), *q = a.q.row(n, t, h), *decay = a.decay.row(n, t, h);
        if (EACH > 0 && (int)threadIdx.x < keys) {
            const int i = threadIdx.x;
            token[0][i] = k[i * a.k.element], token[1][i] = q[i * a.q.element], token[2][i] = decay[i * a.decay.element];
        }
        const float v = is_there ? a.v.row(n, t, h)[column * a.v.element] : 0.0f;
        float y = 0;
        __syncthreads();
        all([&](float &s, int i, int j) {
            const float key = EACH ? token[0][i] : k[i * a.k.element], query = EACH ? token[1][i] : q[i * a.q.element];
            const float write = key * v, before = s;
            s = fmaf(before, EACH ? token[2][i] : decay[i * a.decay.element], write);
            y = fmaf(BONUS ? fmaf(EACH ? bonus[j] : a.bonus[h * keys + i], write, before) : s, query, y);
        });
        sums[warp][lane] = y;
        __syncthreads();
        if (warp == 0 && is_there) {
            y = 0;
#pragma unroll
            for (int w = 0; w < COLUMN_WARPS; w++) y += sums[w][lane];
            a.out.row(n, t, h)[column * a.out.element] = (float)a.scale * y;
        }
    }
    all([&](float s, int i, int) { a.kept[inside + i * a.value_size] = s; });
}
