// Many rows over keys and values that are kept in 16 bits: they are multiplied as they lie in the cache, by queries and
// weights that are rounded to the same type, once.  Sums, and all of the softmax, are float32.

// Tiles that are not hidden, of which 32 are looked up at once.
struct Coming {
    const i32 *seen;
    int at, step, tiles, first;
    u32 some, open;

    // The next tile, `tiles` or more if there is none; `is_open` says whether it is.
    __device__ __forceinline__ int next(bool &is_open) {
        while (some == 0) {
            if (at >= tiles) return tiles;
            const int mine = at + (int)(threadIdx.x % 32) * step, kind = mine >= tiles ? HIDDEN : seen ? seen[mine] : OPEN;
            some = __ballot_sync(ALL_LANES, kind != HIDDEN), open = __ballot_sync(ALL_LANES, kind == OPEN);
            first = at, at += 32 * step;
        }
        const int bit = __ffs((int)some) - 1;
        some &= some - 1, is_open = open >> bit & 1;
        return first + bit * step;
    }
};

// A block is a tile of rows, each warp has 16 of them; blocks are tiles (the last rows first: they see most keys), key heads
// times batches, splits.  While a tile of keys and values is multiplied the next ones come.  `held`: queries stay in
// registers, else in shared memory.
template <class Cell, int D, int E, int KEYS, int STAGES, int OF_WARPS, bool held>
__global__ void __launch_bounds__(32 * OF_WARPS, 1) attend_short(const __grid_constant__ Tiles x) {
    wait_for_earlier();
    constexpr int OF_ROWS = 16 * OF_WARPS, OF_THREADS = 32 * OF_WARPS, STAGE = KEYS * (D + E);
    using P = Pair<Cell>;
    const Args &a = x.a;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int rows = gridDim.x - 1 - blockIdx.x, group = blockIdx.y % (int)a.groups, batch = blockIdx.y / (int)a.groups;
    const int tiles = (int)x.tiles, splits = (int)a.splits, number = blockIdx.z, size = (int)a.size, width = (int)a.width;
    DYNAMIC_SHARED(room, u16);
    u16 *stages = room, *q = held ? room : room + STAGES * STAGE;
    Bias *biases = (Bias *)(room + STAGES * STAGE + (held ? 0 : OF_ROWS * D));
    const Cell *keys = a.k.cells<Cell>(batch, group), *values = a.v.cells<Cell>(batch, group);
    const i32 *seen = x.seen ? x.seen + batch * x.seen_batch + group * x.seen_head + rows * x.tiles : nullptr;

    // Rows of this warp as cells; what products with the two rows that this lane has are multiplied by.
    constexpr int LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32;
    const float cap = (float)a.cap * LOG2_E, scale = (float)a.scale * (cap > 0.0f ? 1.0f : LOG2_E);
    float unit[2] = {0.0f, 0.0f};
#pragma unroll 4
    for (int i = 0; i < 16; i += 32 / LANES) {
        const int mine = 16 * warp + i + lane / LANES;
        const float *from = query_of(a, batch, row_of(a, batch, group, rows * OF_ROWS + mine));
        const float u = split_row<Cell, 1, 1>(from, a.q.column, x.dense, size, LANES, lane % LANES, D, mine, q, 0, true);
        for (int r = 0; r < 2; r++) {
            const int at = g + 8 * r - i;
            const float got = __shfl_sync(ALL_LANES, u, (at * LANES) & 31);
            if (at >= 0 && at < 32 / LANES) unit[r] = got * scale;
        }
    }
    __syncwarp();
    u32 queries[held ? D / 16 : 1][4];
    const int q_row = 16 * warp + lane % 16, turned = lane / 16 ^ lane % 8;
    const int k_row = lane % 8 + lane / 16 * 8, k_turned = lane / 8 % 2 ^ lane % 8;
    int q_at[4], k_at[4], v_at[4];  // of the first four pairs of chunks; eight chunks further all lies alike
#pragma unroll
    for (int i = 0; i < 4; i++)
        q_at[i] = pair(q_row, 2 * i, turned, D), k_at[i] = pair(k_row, 2 * i, k_turned, D), v_at[i] = pair(lane % 16, 2 * i, turned, E);
    if (held) {
#pragma unroll
        for (int d = 0; d < D / 16; d++) ldmatrix_x4(queries[d], q + q_at[d % 4] + d / 4 * 64);
        __syncthreads();
    }
    if (threadIdx.x < OF_ROWS) biases[threadIdx.x] = bias_of(a, batch, row_of(a, batch, group, rows * OF_ROWS + threadIdx.x));

    // Keys past the last one are the last one again.  Eight lanes bring a row: 64 columns, and those 64 further.
    const int sub = threadIdx.x % 8, last_key = (int)a.keys - 1;
    const auto fetch = [&](u16 *tile, const Cell *from, const View &by, int first, int columns, int there) {
#pragma unroll
        for (int row = threadIdx.x / 8; row < KEYS; row += OF_THREADS / 8) {
            const Cell *cells = from + min(first + row, last_key) * by.row;
            u16 *to = tile + chunk(row, sub, columns);
            if (x.vectors) {
#pragma unroll
                for (int c = 0; c < columns; c += 64)
                    if (8 * sub + c < there) cp_async_16(to + c, cells + 8 * sub + c);
            } else {
#pragma unroll 1
                for (int i = 0; i < columns / 8; i++) {
                    const int c = i / 8 * 64 + i % 8, column = 8 * sub + c;
                    to[c] = column < there ? cells[column * by.column].bits : (u16)0;
                }
            }
        }
    };
    const auto fetch_tile = [&](int tile, int stage) {
        u16 *to = stages + stage * STAGE;
        fetch(to, keys, a.k, tile * KEYS, D, size);
        fetch(to + KEYS * D, values, a.v, tile * KEYS, E, width);
    };
    if (size < D) {  // columns that no key has
        for (int i = threadIdx.x; i < STAGES * STAGE / 8; i += OF_THREADS) *(uint4 *)(stages + 8 * i) = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }

    float acc[E / 8][4] = {};
    Powers<KEYS, false, 0> powers;
    Coming coming = {seen, number, splits, tiles, 0, 0u, 0u};
    int tile[STAGES], stage = 0;  // this one, and those after it
    bool open[STAGES];
#pragma unroll
    for (int i = 0; i + 1 < STAGES; i++) {
        tile[i] = coming.next(open[i]);
        if (tile[i] < tiles) fetch_tile(tile[i], i);
        cp_async_commit();
    }
    while (tile[0] < tiles) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const int last = tile[STAGES - 1] = coming.next(open[STAGES - 1]), first = tile[0] * KEYS;
        if (last < tiles) fetch_tile(last, stage ? stage - 1 : STAGES - 1);
        cp_async_commit();
        const u16 *k = stages + stage * STAGE, *v = k + KEYS * D;
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 other[4];
            if (!held) ldmatrix_x4(other, q + q_at[d % 4] + d / 4 * 64);
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 b[4];
                ldmatrix_x4(b, k + k_at[d % 4] + d / 4 * 64 + 16 * n * D);
                P::multiply(s[2 * n], held ? queries[d] : other, b), P::multiply(s[2 * n + 1], held ? queries[d] : other, b + 2);
            }
        }
        const Bias *added = open[0] && first + KEYS <= a.keys ? nullptr : biases + 16 * warp + g;
        float fade[2], by[2] = {unit[0], unit[1]};
        if (cap > 0.0f || added || unit[0] < 0.0f) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                float &score = s[i / 4][i % 4];
                score *= unit[i % 4 / 2];
                if (cap > 0.0f) score = cap * tanhf(score);
            }
            if (added)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const Bias bias = added[8 * r];
#pragma unroll
                    for (int i = 0; i < KEYS / 4; i++)
                        s[i / 2][2 * r + i % 2] += LOG2_E * bias_at(a, bias, first + 8 * (i / 2) + 2 * t + i % 2);
                }
            by[0] = by[1] = 1.0f;
        }
        powers.take(s, fade, by);
        if (__any_sync(ALL_LANES, fade[0] < 1.0f || fade[1] < 1.0f))
#pragma unroll
            for (int e = 0; e < E / 2; e++) acc[e / 4][e % 4] *= fade[e % 4 / 2];
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = P::pack(s[2 * n + i / 2][2 * (i % 2)], s[2 * n + i / 2][2 * (i % 2) + 1]);
#pragma unroll
            for (int e = 0; e < E / 16; e++) {
                u32 b[4];
                ldmatrix_x4_trans(b, v + v_at[e % 4] + e / 4 * 64 + 16 * n * E);
                P::multiply(acc[2 * e], p, b), P::multiply(acc[2 * e + 1], p, b + 2);
            }
        }
#pragma unroll
        for (int i = 0; i + 1 < STAGES; i++) tile[i] = tile[i + 1], open[i] = open[i + 1];
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    powers.join();

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const Row row = row_of(a, batch, group, rows * OF_ROWS + 16 * warp + g + 8 * r);
        const float top = powers.top[r] / LOG2_E, share = splits > 1 ? 1.0f : share_of(a, row.head, top, powers.sum[r]);
        float *target = target_of(a, batch, row, number);
        if (!row.real) continue;
#pragma unroll
        for (int e = 0; e < E / 8; e++) {
            const int c = 8 * e + 2 * t;
            const float one = acc[e][2 * r] * share, two = acc[e][2 * r + 1] * share;
            if (width % 2 == 0 && (u64)target % 8 == 0) {
                if (c < width) *(float2 *)(target + c) = make_float2(one, two);
            } else {
                if (c < width) target[c] = one;
                if (c + 1 < width) target[c + 1] = two;
            }
        }
        if (splits > 1 && t == 0) keep_state(a, row, number, top, powers.sum[r]);
    }
}
