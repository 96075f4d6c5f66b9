// Products of many tokens with weights of 16 bits by clusters of blocks, in the terms of tiled.cu and with what
// warpgroups.cu has for weights and sums; both stand before.  A block has 128 rows of weights, of which each of its two
// warpgroups multiplies 64 with 256 entries.
//
// What the second cache is asked for sets the time of such products.  Blocks of a cluster have the same entries, and
// neighbouring rows: each fetches its part of a stage of x for all of them, in one copy, as split_tiles has left x as it
// lies in shared memory.  So four blocks ask for half of what they would on their own, with 256 rows and 128 entries.
//
// A stage of x is 64 columns of a term; weights stay for all terms.  A block says to the others that a stage may be written
// over once all its warps have waited for the product of the step before the last.

constexpr int HIGH = 128, WIDE = 256, ENTRY = COLUMNS * sizeof(u16);  // bytes of a stage

// As split_rows, for tiles that begin with the first token of a matrix: a stage behind the other, the terms of the same
// columns from the smallest on.
struct SplitTiles : Split {
    i64 tokens;
};
template <class T, int TERMS> __global__ void __launch_bounds__(1024) split_tiles(const __grid_constant__ SplitTiles a) {
    wait_for_earlier();
    const u32 tokens = (u32)a.tokens, matrix = blockIdx.x / tokens, token = blockIdx.x % tokens;
    const u32 tile = matrix * ((tokens + WIDE - 1) / WIDE) + token / WIDE, entry = token % WIDE;
    u16 *terms = a.terms + (tile * whole_stages(a.columns) * TERMS * WIDE + entry * COLUMNS);
    split_row<T, TERMS>(a, [&](int term, i64 c) {
        const u32 stage = (u32)c / COLUMNS * TERMS + (TERMS - 1 - term), piece = (u32)c % COLUMNS / 8;
        return terms + (i64)stage * WIDE * COLUMNS + swizzled(entry, piece) + c % 8;
    });
}

template <int TERMS> struct Room {
    static constexpr int OF_X = 4, OF_W = TERMS == 1 ? 4 : 3;  // stages
    u16 x[OF_X][WIDE][COLUMNS];
    struct { u16 w[HIGH][COLUMNS]; } weights[OF_W];
    u64 full[OF_X], empty[OF_X];  // mbarriers
};

// The sums of the rows from `first` on with the entries of a tile, as warpgroups have them.
template <class T, class A> __device__ __forceinline__ void store_sums(const A &a, const int4 &tile, i64 first, const float (&sum)[128]) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int entry = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (entry >= tile.z) continue;
        float *out = a.out + (tile.y + entry) * a.out_step + first;
        const float undo = IS_SCALED<T> ? a.undo[tile.y + entry] : 1.0f;
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (first + row + 8 * h < a.rows) out[row + 8 * h] = sum[i / 2 * 4 + 2 * h + i % 2] * undo;
    }
}

template <class T, int TERMS> __global__ void __launch_bounds__(THREADS) clustered(const __grid_constant__ Grouped<T> a) {
    wait_for_earlier();
    constexpr int OF_X = Room<TERMS>::OF_X, OF_W = Room<TERMS>::OF_W;
    DYNAMIC_SHARED(memory, u8);
    auto &room = *aligned<Room<TERMS>>(memory);
    const u32 blocks = cluster_size();
    if (threadIdx.x == 0) {
        for (int s = 0; s < OF_X; s++) init_mbarrier(&room.full[s], 1), init_mbarrier(&room.empty[s], blocks);
        show_mbarriers();
    }
    sync_cluster();

    const int4 tile = a.tiles[blockIdx.x];
    const i64 first = (i64)blockIdx.y * HIGH, begin = blockIdx.z * a.run, end = min(begin + a.run, a.columns);
    const int steps = (int)((end - begin + COLUMNS - 1) / COLUMNS) * TERMS;
    // This block's part of the entries of a stage.
    const int each = WIDE / blocks, from = cluster_rank() * each, mine = min(each, tile.z - from);
    const u16 *x = a.x + ((blockIdx.x * whole_stages(a.columns) + begin) * TERMS * WIDE + from * COLUMNS);
    auto bring = [&](int step) {
        u64 *full = &room.full[step % OF_X];
        wait_for_phase(&room.empty[step % OF_X], step / OF_X % 2 ^ 1);
        arrive_before(full, tile.z * ENTRY);
        if (mine > 0) copy_to_blocks(room.x[step % OF_X][from], x + (i64)step * WIDE * COLUMNS, mine * ENTRY, full, (1 << blocks) - 1);
    };
    const Dense<T, HIGH> weights(a, tile.x, first, end);
    auto fetch = [&](int stage) {
        const i64 start = begin + stage * COLUMNS;
        if (start < end) weights.fetch(room.weights[stage % OF_W], start);
        cp_async_commit();
    };

    if (threadIdx.x == 0)
        for (int step = 0; step < min(OF_X - 2, steps); step++) bring(step);
#pragma unroll
    for (int stage = 0; stage < OF_W - 2; stage++) fetch(stage);
    float sum[128];
#pragma unroll
    for (int i = 0; i < 128; i++) sum[i] = 0.0f;
    for (int step = 0; step < steps; step += TERMS) {
#pragma unroll
        for (int term = 0; term < TERMS; term++) {
            const int now = step + term, stage = step / TERMS;
            if (term == 0) cp_async_wait<OF_W - 3>(), show_to_products();
            __syncthreads();  // the weights are there, and the product of the step before the last is over
            wait_for_phase(&room.full[now % OF_X], now / OF_X % 2);
            const u64 w = operand_at(room.weights[stage % OF_W].w[threadIdx.x / 128 * 64]), of_x = operand_at(room.x[now % OF_X]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; k++) wgmma(sum, w + STEP * k, of_x + STEP * k, T{});
            wgmma_commit();
            if (term == 0) fetch(stage + OF_W - 2);
            if (now >= 2 && threadIdx.x < blocks) arrive_at(&room.empty[(now - 2) % OF_X], threadIdx.x);
            if (now + OF_X - 2 < steps && threadIdx.x == 0) bring(now + OF_X - 2);
            wgmma_wait<1>(sum);
        }
    }
    wgmma_wait<0>(sum);
    sync_cluster();  // nobody arrives here any more
    if (a.parts != nullptr && !has_all(a, sum, *(u32 *)&room)) return;

    store_sums<T>(a, tile, first, sum);
}
