// Many rows over keys and values of 16 bits, by products of warpgroups, of which each has 64 rows.
//
// The scores of a tile of keys and the sums over the values of the tile before are begun together: while these are made,
// scores become weights.  A stage of keys or values is written over behind the barrier that all warps come to once they have
// waited for both.

constexpr int PANEL = 64;  // columns that lie together in shared memory

template <class Cell, int D, int E, int KEYS, int OF_WARPS>
__global__ void __launch_bounds__(32 * OF_WARPS, 1) attend_warpgroups(const __grid_constant__ Tiles x) {
    wait_for_earlier();
    constexpr int OF_ROWS = 16 * OF_WARPS, OF_THREADS = 32 * OF_WARPS;
    const Args &a = x.a;
    DYNAMIC_SHARED(memory, u8);
    u16 *k = aligned<u16>(memory), *v = k + 2 * KEYS * D, *q = v + 2 * KEYS * E;
    Bias *biases = (Bias *)(q + OF_ROWS * D);
    Many<Cell, KEYS, OF_WARPS> many(x);
    const int tiles = (int)x.tiles;

    // `split_row` goes D numbers from row to row and 64 from panel to panel.
    many.template take_queries<D>([&](int row, int c) { return q + c / 8 * PANEL * (OF_ROWS - 1) - row * (D - PANEL); });
    many.note_biases(biases);
    if (a.size < D) {  // columns that no key has
        for (int i = threadIdx.x; i < 2 * KEYS * D / 8; i += OF_THREADS) *(uint4 *)(k + 8 * i) = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }
    const auto fetch_keys = [&](int tile, int stage) {
        if (tile < tiles) many.template fetch<D, PANEL, KEYS * PANEL>(k + stage * KEYS * D, many.keys, a.k, tile * KEYS, (int)a.size);
    };
    const auto fetch_values = [&](int tile, int stage) {
        many.template fetch<E, PANEL, KEYS * PANEL>(v + stage * KEYS * E, many.values, a.v, tile * KEYS, (int)a.width);
    };

    float s[KEYS / 2], acc[E / 2] = {};
    float(*scores)[4] = (float(*)[4])s, (*sums)[4] = (float(*)[4])acc;
    u32 weights[KEYS / 16][4];
    const u64 queries = operand_at(q + many.warp / 4 * 64 * PANEL);
    const auto begin_scores = [&](int stage) {
        multiply_panels<D, OF_ROWS, KEYS>(s, queries, operand_at(k + stage * KEYS * D), Cell{});
        wgmma_commit();
    };
    const auto begin_sums = [&](int stage) {
        const u64 of_values = operand_at(v + stage * KEYS * E, KEYS * PANEL * sizeof(u16));
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) wgmma(acc, weights[n], of_values + 16 * n * ROW, Cell{});
        wgmma_commit();
    };

    const auto arrive = [&] {  // of the stages that are on their way
        cp_async_wait<0>();
        show_to_products();
        __syncthreads();
    };

    Powers<KEYS, false, 0> powers;
    Coming coming = many.coming();
    bool open, next_open;
    int tile = coming.next(open), next = tiles, stage = 0;
    const auto fetch_next = [&] {
        next = coming.next(next_open);
        fetch_keys(next, stage ^ 1);
        fetch_values(tile, stage);
        cp_async_commit();
    };
    if (tile < tiles) {
        fetch_keys(tile, 0);
        cp_async_commit();
        arrive();
        wgmma_fence(acc);
        begin_scores(0);
        wgmma_commit();  // no sums yet
        fetch_next();
        while (true) {
            float fade[2];
            wgmma_wait<1>(s);
            many.weigh(scores, powers, fade, biases, tile * KEYS, open);
            wgmma_wait<0>(acc);
            many.template fade_all<E>(sums, fade);
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) many.pack(scores + 2 * n, weights[n]);
            arrive();
            if (next >= tiles) break;
            wgmma_fence(acc);
            begin_scores(stage ^ 1);
            begin_sums(stage);
            tile = next, open = next_open, stage ^= 1;
            fetch_next();
        }
        wgmma_fence(acc);
        begin_sums(stage);
        wgmma_wait<0>(acc);
    }
    many.template store<E>(sums, powers);
}
