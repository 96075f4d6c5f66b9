// Many rows over keys and values of 16 bits, by products of warps.

// While a tile of keys and values is multiplied the next ones come.  `held`: queries stay in registers, else in shared
// memory.
template <class Cell, int D, int E, int KEYS, int STAGES, int OF_WARPS, bool held>
__global__ void __launch_bounds__(32 * OF_WARPS, 1) attend_short(const __grid_constant__ Tiles x) {
    wait_for_earlier();
    constexpr int OF_ROWS = 16 * OF_WARPS, OF_THREADS = 32 * OF_WARPS, STAGE = KEYS * (D + E);
    using P = Pair<Cell>;
    const Args &a = x.a;
    DYNAMIC_SHARED(room, u16);
    u16 *stages = room, *q = held ? room : room + STAGES * STAGE;
    Bias *biases = (Bias *)(room + STAGES * STAGE + (held ? 0 : OF_ROWS * D));
    Many<Cell, KEYS, OF_WARPS> many(x);
    const int lane = many.lane, warp = many.warp, tiles = (int)x.tiles, size = (int)a.size;

    many.template take_queries<D>([&](int, int) { return q; });
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
    many.note_biases(biases);
    const auto fetch_tile = [&](int tile, int stage) {
        u16 *to = stages + stage * STAGE;
        many.template fetch<D, D, 64>(to, many.keys, a.k, tile * KEYS, size);
        many.template fetch<E, E, 64>(to + KEYS * D, many.values, a.v, tile * KEYS, (int)a.width);
    };
    if (size < D) {  // columns that no key has
        for (int i = threadIdx.x; i < STAGES * STAGE / 8; i += OF_THREADS) *(uint4 *)(stages + 8 * i) = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }

    float acc[E / 8][4] = {};
    Powers<KEYS, false, 0> powers;
    Coming coming = many.coming();
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
        const int last = tile[STAGES - 1] = coming.next(open[STAGES - 1]);
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
        float fade[2];
        many.weigh(s, powers, fade, biases, tile[0] * KEYS, open[0]);
        many.template fade_all<E>(acc, fade);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 p[4];
            many.pack(s + 2 * n, p);
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
    many.template store<E>(acc, powers);
}
