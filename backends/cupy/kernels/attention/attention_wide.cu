// Many rows of keys and values that are wider than one warp holds (576 and 512 columns, as of latent attention): four warps
// share 16 rows.  Each holds a quarter of the columns of the queries, in registers, and of the sums of values; their parts of
// the scores meet in shared memory.

constexpr int WIDE_THREADS = 256, WIDE_ROWS = 32, SHARING = 4;

// A block is half a tile of rows (the last ones first: they see most keys); blocks are these, key heads times batches, splits.
template <int D, int E>
__global__ void __launch_bounds__(WIDE_THREADS, 1) attend_wide(const __grid_constant__ Tiles x) {
    wait_for_earlier();
    constexpr int KEYS = 16, OWN_D = D / 16 / SHARING, OWN_E = E / SHARING;
    const Args &a = x.a;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % SHARING, mine = warp / SHARING * 16, g = lane / 4, t = lane % 4;
    const int rows = gridDim.x - 1 - blockIdx.x, group = blockIdx.y % (int)a.groups, batch = blockIdx.y / (int)a.groups;
    const int tiles = (int)x.tiles, splits = (int)a.splits, number = blockIdx.z, size = (int)a.size, width = (int)a.width;
    DYNAMIC_SHARED(room, u16);
    u16 *k = room, *v = k + 2 * KEYS * D, *q = room;
    const i64 place = (i64)blockIdx.y * x.tiles;
    const u16 *keys = x.k + place * 2 * KEYS * D, *values = x.v + place * 2 * KEYS * E;
    const float *k_units = x.k_units + place * KEYS, *v_units = x.v_units + place * KEYS;
    const i32 *seen = x.seen ? x.seen + batch * x.seen_batch + group * x.seen_head + rows * WIDE_ROWS / ROWS * x.tiles : nullptr;

    // Queries as halves, of which a warp keeps a quarter of the columns of its 16 rows.
    SHARED(units, float[WIDE_ROWS]);
    SHARED(biases, Bias[WIDE_ROWS]);
    for (int r = warp; r < WIDE_ROWS; r += WIDE_THREADS / 32) {
        const Row row = row_of(a, batch, group, rows * WIDE_ROWS + r);
        const float u = split_row<half_bits, 2, 3>(query_of(a, batch, row), a.q.column, x.dense, size, 32, lane, D, r, q, WIDE_ROWS * D, true);
        if (lane == 0) units[r] = u * (float)a.scale, biases[r] = bias_of(a, batch, row);
    }
    __syncthreads();
    u32 q_high[OWN_D][4], q_low[OWN_D][4];
    const int q_row = mine + lane % 16, turned = lane / 16 ^ lane % 8;
    const int k_row = lane % 8 + lane / 16 * 8, k_turned = lane / 8 % 2 ^ lane % 8;
#pragma unroll
    for (int d = 0; d < OWN_D; d++) {
        ldmatrix_x4(q_high[d], q + pair(q_row, 2 * (part * OWN_D + d), turned, D));
        ldmatrix_x4(q_low[d], q + WIDE_ROWS * D + pair(q_row, 2 * (part * OWN_D + d), turned, D));
    }
    const float unit[2] = {units[mine + g], units[mine + g + 8]};
    __syncthreads();

    SHARED(scores, float4[WIDE_THREADS / 32][2][32]);  // of a warp: two for each lane
    float acc[OWN_E / 8][4] = {};
    Weights<KEYS> weights;
    int tile = next_tile(seen, number, splits, tiles);
    if (tile < tiles) copy_tile(k, keys + (i64)tile * 2 * KEYS * D, 2 * KEYS * D);
    cp_async_commit();
    while (tile < tiles) {
        copy_tile(v, values + (i64)tile * 2 * KEYS * E, 2 * KEYS * E);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        float s[2][4] = {};
#pragma unroll
        for (int d = 0; d < OWN_D; d++) {
            u32 h[4], l[4];
            const int at = pair(k_row, 2 * (part * OWN_D + d), k_turned, D);
            ldmatrix_x4(h, k + at);
            ldmatrix_x4(l, k + KEYS * D + at);
            multiply(s[0], s[1], q_high[d], q_low[d], h, l);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) scores[warp][n][lane] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
        __syncthreads();
        const int first = tile * KEYS, next = next_tile(seen, tile + splits, splits, tiles);
        if (next < tiles) copy_tile(k, keys + (i64)next * 2 * KEYS * D, 2 * KEYS * D);
        cp_async_commit();
#pragma unroll
        for (int n = 0; n < 2; n++) {  // all four warps add up the same numbers in the same order
            float4 sum = scores[warp - part][n][lane];
#pragma unroll
            for (int w = 1; w < SHARING; w++) {
                const float4 more = scores[warp - part + w][n][lane];
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            s[n][0] = sum.x, s[n][1] = sum.y, s[n][2] = sum.z, s[n][3] = sum.w;
        }
        const bool open = seen ? seen[tile] == OPEN : first + KEYS <= a.keys;
        float change[2];
        weights.take(a, s, change, unit, k_units + first, v_units + first, open ? nullptr : biases + mine + g, first);
#pragma unroll
        for (int e = 0; e < OWN_E / 2; e++) acc[e / 4][e % 4] *= change[e % 4 / 2];
        u32 p_high[4], p_low[4];
        split_weights(s, p_high, p_low);
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int e = 0; e < OWN_E / 16; e++) {
            u32 h[4], l[4];
            const int at = pair(lane % 16, 2 * (part * OWN_E / 16 + e), turned, E);
            ldmatrix_x4_trans(h, v + at);
            ldmatrix_x4_trans(l, v + KEYS * E + at);
            multiply(acc[2 * e], acc[2 * e + 1], p_high, p_low, h, l);
        }
        __syncthreads();
        tile = next;
    }
    cp_async_wait<0>();

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const Row row = row_of(a, batch, group, rows * WIDE_ROWS + mine + g + 8 * r);
        const float share = weights.share(a, row, r);
        float *target = target_of(a, batch, row, number);
        if (!row.real) continue;
#pragma unroll
        for (int e = 0; e < OWN_E / 8; e++)
            for (int i = 0; i < 2; i++) {
                const int column = part * OWN_E + 8 * e + 2 * t + i;
                if (column < width) target[column] = acc[e][2 * r + i] * share;
            }
        if (splits > 1 && t == 0 && part == 0) keep_state(a, row, number, weights.top[r], weights.sum[r]);
    }
}
