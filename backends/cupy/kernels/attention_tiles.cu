// Many rows: tiles of them and of keys meet on tensor cores, as halves.

constexpr float LEAST = 0x1p-100f;  // unit of weights

// `chunk` of one of two neighbours, for the lane: `turned` is which of them, by the lowest bit of its own, and its row.
__device__ __forceinline__ int pair(int row, int even, int turned, int columns) {
    return row * columns + 8 * ((even & ~7) + ((even & 6) ^ turned));
}
// Sum of three products of a tile of A, high and low, with two tiles of B beside each other.
__device__ __forceinline__ void multiply(float *d, float *e, const u32 *high, const u32 *low, const u32 *h, const u32 *l) {
    mma_f16(d, high, l), mma_f16(e, high, l + 2);
    mma_f16(d, low, h), mma_f16(e, low, h + 2);
    mma_f16(d, high, h), mma_f16(e, high, h + 2);
}
__device__ __forceinline__ void copy_tile(u16 *to, const u16 *from, int halves) {
    for (int i = 8 * threadIdx.x; i < halves; i += 8 * THREADS) cp_async_16(to + i, from + i);
}
// The first tile from `i`, in steps of `step`, that is not hidden; `tiles` or more if there is none.
__device__ __forceinline__ int next_tile(const i32 *seen, int i, int step, int tiles) {
    if (seen == nullptr) return i;
    for (; i < tiles; i += 32 * step) {
        const int mine = i + (int)(threadIdx.x % 32) * step;
        const u32 some = __ballot_sync(ALL_LANES, mine < tiles && seen[mine] != HIDDEN);
        if (some) return i + (__ffs((int)some) - 1) * step;
    }
    return tiles;
}

// A block is a tile of rows, each warp has 16 of them; blocks are tiles (the last rows first: they see most keys), key
// heads times batches, splits.  `held`: queries stay in registers, else in shared memory.
template <int D, int E, int KEYS, bool held>
__global__ void __launch_bounds__(THREADS) attend_tiles(const __grid_constant__ Tiles x) {
    const Args &a = x.a;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int rows = gridDim.x - 1 - blockIdx.x, group = blockIdx.y % (int)a.groups, batch = blockIdx.y / (int)a.groups;
    const int tiles = (int)x.tiles, splits = (int)a.splits, number = blockIdx.z, size = (int)a.size, width = (int)a.width;
    const float cap = (float)a.cap;
    DYNAMIC_SHARED(room, u16);
    u16 *k = room, *v = k + 2 * KEYS * D, *q = held ? room : v + 2 * KEYS * E;
    const i64 place = (i64)blockIdx.y * x.tiles;
    const u16 *keys = x.k + place * 2 * KEYS * D, *values = x.v + place * 2 * KEYS * E;
    const float *k_units = x.k_units + place * KEYS, *v_units = x.v_units + place * KEYS;
    const i32 *seen = x.seen ? x.seen + batch * x.seen_batch + group * x.seen_head + rows * x.tiles : nullptr;

    // Rows of this warp as halves; unit and mask of the two rows that this lane has.
    constexpr int LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32;
    float unit[2] = {0.0f, 0.0f};
    for (int i = 0; i < 16; i += 32 / LANES) {
        const int mine = 16 * warp + i + lane / LANES, c = lane % LANES;
        const Row row = row_of(a, batch, group, rows * ROWS + mine);
        u16 *to = q + chunk(mine, c, D);
        const float u = split_row(query_of(a, batch, row), a.q.column, x.dense, size, LANES, c, to, to + ROWS * D, 8 * c < D);
        for (int r = 0; r < 2; r++) {
            const int at = g + 8 * r - i;
            const float got = __shfl_sync(ALL_LANES, u, (at * LANES) & 31);
            if (at >= 0 && at < 32 / LANES) unit[r] = got * (float)a.scale;
        }
    }
    __syncwarp();
    u32 q_high[held ? D / 16 : 1][4], q_low[held ? D / 16 : 1][4];
    const int q_row = 16 * warp + lane % 16, turned = lane / 16 ^ lane % 8;
    const int k_row = lane % 8 + lane / 16 * 8, k_turned = lane / 8 % 2 ^ lane % 8;
    if (held) {
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            ldmatrix_x4(q_high[d], q + pair(q_row, 2 * d, turned, D));
            ldmatrix_x4(q_low[d], q + ROWS * D + pair(q_row, 2 * d, turned, D));
        }
        __syncthreads();
    }
    SHARED(biases, Bias[ROWS]);
    if (threadIdx.x < ROWS) biases[threadIdx.x] = bias_of(a, batch, row_of(a, batch, group, rows * ROWS + threadIdx.x));

    float acc[E / 8][4] = {}, top[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f};
    float run[2] = {LEAST, LEAST};  // a power of two: acc is in units of run / 2^14
    int tile = next_tile(seen, number, splits, tiles);
    if (tile < tiles) copy_tile(k, keys + (i64)tile * 2 * KEYS * D, 2 * KEYS * D);
    cp_async_commit();
    while (tile < tiles) {
        copy_tile(v, values + (i64)tile * 2 * KEYS * E, 2 * KEYS * E);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 high[4], low[4];
            if (!held) {
                ldmatrix_x4(high, q + pair(q_row, 2 * d, turned, D));
                ldmatrix_x4(low, q + ROWS * D + pair(q_row, 2 * d, turned, D));
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 h[4], l[4];
                const int at = pair(16 * n + k_row, 2 * d, k_turned, D);
                ldmatrix_x4(h, k + at);
                ldmatrix_x4(l, k + KEYS * D + at);
                multiply(s[2 * n], s[2 * n + 1], held ? q_high[d] : high, held ? q_low[d] : low, h, l);
            }
        }
        __syncthreads();
        const int first = tile * KEYS, next = next_tile(seen, tile + splits, splits, tiles);
        if (next < tiles) copy_tile(k, keys + (i64)next * 2 * KEYS * D, 2 * KEYS * D);
        cp_async_commit();

        const bool open = seen ? seen[tile] == OPEN : first + KEYS <= a.keys;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            const float2 u = *(const float2 *)(k_units + first + 8 * n + 2 * t);
            s[n][0] *= unit[0] * u.x, s[n][1] *= unit[0] * u.y, s[n][2] *= unit[1] * u.x, s[n][3] *= unit[1] * u.y;
        }
        if (cap > 0.0f)
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) s[i / 4][i % 4] = cap * tanhf(s[i / 4][i % 4]);
        if (!open)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Bias bias = biases[16 * warp + g + 8 * r];
#pragma unroll
                for (int i = 0; i < KEYS / 4; i++)
                    s[i / 2][2 * r + i % 2] += bias_at(a, bias, first + 8 * (i / 2) + 2 * t + i % 2);
            }
        float high[2] = {top[0], top[1]}, fade[2], most[2];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            high[0] = fmaxf(high[0], fmaxf(s[n][0], s[n][1])), high[1] = fmaxf(high[1], fmaxf(s[n][2], s[n][3]));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            for (int by = 1; by < 4; by <<= 1) high[r] = fmaxf(high[r], __shfl_xor_sync(ALL_LANES, high[r], by));
            fade[r] = grown(top[r] - high[r]);
            top[r] = high[r], sum[r] *= fade[r];
            most[r] = fmaxf(run[r] * fade[r], LEAST);
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            const float2 u = *(const float2 *)(v_units + first + 8 * n + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float p = grown(s[n][i] - top[i / 2]);
                sum[i / 2] += p;
                s[n][i] = p * (i % 2 ? u.y : u.x);
                most[i / 2] = fmaxf(most[i / 2], s[n][i]);
            }
        }
        // Weights as halves: the largest, times the unit of its value, becomes 2^14 or more.
#pragma unroll
        for (int r = 0; r < 2; r++) {
            for (int by = 1; by < 4; by <<= 1) most[r] = fmaxf(most[r], __shfl_xor_sync(ALL_LANES, most[r], by));
            most[r] = __uint_as_float(__float_as_uint(most[r]) & 0xff800000u);
            const float change = fade[r] * (run[r] / most[r]), up = 16384.0f / most[r];
            run[r] = most[r];
#pragma unroll
            for (int e = 0; e < E / 8; e++) acc[e][2 * r] *= change, acc[e][2 * r + 1] *= change;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) s[n][2 * r] *= up, s[n][2 * r + 1] *= up;
        }
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 p_high[4], p_low[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                split(s[2 * n + i / 2][2 * (i % 2)], s[2 * n + i / 2][2 * (i % 2) + 1], p_high[i], p_low[i]);
#pragma unroll
            for (int e = 0; e < E / 16; e++) {
                u32 h[4], l[4];
                const int at = pair(16 * n + lane % 16, 2 * e, turned, E);
                ldmatrix_x4_trans(h, v + at);
                ldmatrix_x4_trans(l, v + KEYS * E + at);
                multiply(acc[2 * e], acc[2 * e + 1], p_high, p_low, h, l);
            }
        }
        __syncthreads();
        tile = next;
    }
    cp_async_wait<0>();

#pragma unroll
    for (int r = 0; r < 2; r++) {
        for (int by = 1; by < 4; by <<= 1) sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], by);
        const Row row = row_of(a, batch, group, rows * ROWS + 16 * warp + g + 8 * r);
        const float share = (splits > 1 ? 1.0f : share_of(a, row.head, top[r], sum[r])) * (run[r] / 16384.0f);
        float *target = target_of(a, batch, row, number);
        if (!row.real) continue;
#pragma unroll
        for (int e = 0; e < E / 8; e++)
            for (int i = 0; i < 2; i++)
                if (8 * e + 2 * t + i < width) target[8 * e + 2 * t + i] = acc[e][2 * r + i] * share;
        if (splits > 1 && t == 0) keep_state(a, row, number, top[r], sum[r]);
    }
}
