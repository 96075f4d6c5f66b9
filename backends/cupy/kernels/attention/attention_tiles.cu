// Many rows: tiles of them and of keys meet on tensor cores, as halves.

// A block is a tile of rows, each warp has 16 of them; blocks are tiles (the last rows first: they see most keys), key
// heads times batches, splits.  `held`: queries stay in registers, else in shared memory.
template <int D, int E, int KEYS, bool held>
__global__ void __launch_bounds__(THREADS) attend_tiles(const __grid_constant__ Tiles x) {
    wait_for_earlier();
    const Args &a = x.a;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int rows = gridDim.x - 1 - blockIdx.x, group = blockIdx.y % (int)a.groups, batch = blockIdx.y / (int)a.groups;
    const int tiles = (int)x.tiles, splits = (int)a.splits, number = blockIdx.z, size = (int)a.size, width = (int)a.width;
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
        const int mine = 16 * warp + i + lane / LANES;
        const Row row = row_of(a, batch, group, rows * ROWS + mine);
        const float *from = query_of(a, batch, row);
        const float u = split_row<half_bits, 2, 1>(from, a.q.column, x.dense, size, LANES, lane % LANES, D, mine, q, ROWS * D, true);
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

    float acc[E / 8][4] = {};
    Weights<KEYS> weights;
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
        float change[2];
        weights.take(a, s, change, unit, k_units + first, v_units + first, open ? nullptr : biases + 16 * warp + g, first);
#pragma unroll
        for (int e = 0; e < 4 * (E / 8); e++) acc[e / 4][e % 4] *= change[e % 4 / 2];
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 p_high[4], p_low[4];
            split_weights(s + 2 * n, p_high, p_low);
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
        const Row row = row_of(a, batch, group, rows * ROWS + 16 * warp + g + 8 * r);
        const float share = weights.share(a, row, r);
        float *target = target_of(a, batch, row, number);
        if (!row.real) continue;
#pragma unroll
        for (int e = 0; e < E / 8; e++)
            for (int i = 0; i < 2; i++)
                if (8 * e + 2 * t + i < width) target[8 * e + 2 * t + i] = acc[e][2 * r + i] * share;
        if (splits > 1 && t == 0) keep_state(a, row, number, weights.top[r], weights.sum[r]);
    }
}
