// Products of many tokens with one matrix of 16-bit weights by warps with roles, over the tiles of clusters.cu, which stands
// before.  A cluster takes one tile of entries after another: one thread of a block brings the stages, and each of two
// warpgroups, the consumers, multiplies 64 rows of weights with 256 entries.
//
// A stage has 64 columns of weights and of entries, which lie in memory as in shared memory, so that bulk copies bring them.
// Consumers share stages.  The second one begins a tile of many steps LEAD steps behind the first, so that tensor cores have products of one
// while the other stores its results, and stages of the next tile are on their way meanwhile.

constexpr int STAGES = 4, CONSUMERS = 2, OF_CONSUMERS = 128 * CONSUMERS, LEAD = 2;
constexpr u32 FOR_COPIES = 40, FOR_PRODUCTS = 232, BEHIND = 1;  // registers of a thread; a named barrier

template <class T> struct Weights {
    const T *w;
    u16 *tiles;  // [tiles of rows][stages][HIGH][COLUMNS], rows past the last are the last one, columns past the last are zeros
    i64 rows, columns, step;
};
// Blocks are stages, tiles of rows.
template <class T> __global__ void __launch_bounds__(THREADS) tile_weights(const __grid_constant__ Weights<T> a) {
    wait_for_earlier();
    u16 *to = a.tiles + ((i64)blockIdx.y * gridDim.x + blockIdx.x) * HIGH * COLUMNS;
    const int eight = threadIdx.x % 8;
    const i64 column = (i64)blockIdx.x * COLUMNS + 8 * eight;
    const bool is_whole = (((u64)a.w | (u64)a.step * sizeof(T)) & 15) == 0 && column + 8 <= a.columns;
#pragma unroll
    for (int row = threadIdx.x / 8; row < HIGH; row += BELOW) {
        const T *from = a.w + min((i64)blockIdx.y * HIGH + row, a.rows - 1) * a.step + column;
        uint4 cells = make_uint4(0, 0, 0, 0);
        if (is_whole) {
            cells = *(const uint4 *)from;
        } else {
            u32 pairs[4];
            for (int i = 0; i < 4; i++) {
                const u32 low = column + 2 * i < a.columns ? from[2 * i].bits : 0, high = column + 2 * i + 1 < a.columns ? from[2 * i + 1].bits : 0;
                pairs[i] = low | high << 16;
            }
            cells = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        *(uint4 *)(to + row * COLUMNS + swizzled(row, eight)) = cells;
    }
}

template <class T> struct Persistent : Product<T> {  // `w` as tile_weights leaves it, `x` as split_tiles
    i64 count, items;  // tiles of entries; the same times clusters of row tiles
};
struct Stages {
    u16 w[STAGES][HIGH][COLUMNS], x[STAGES][WIDE][COLUMNS];
    u64 full[STAGES], empty[STAGES];  // mbarriers
};
template <class T> __global__ void __launch_bounds__(OF_CONSUMERS + 128, 1) multiply_by_roles(const __grid_constant__ Persistent<T> a) {
    wait_for_earlier();
    DYNAMIC_SHARED(memory, u8);
    auto &room = *aligned<Stages>(memory);
    const u32 blocks = cluster_size(), rank = cluster_rank(), begin = blockIdx.x / blocks, clusters = gridDim.x / blocks;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) init_mbarrier(&room.full[s], 1), init_mbarrier(&room.empty[s], 4 * CONSUMERS * blocks);
        show_mbarriers();
    }
    sync_cluster();
    const int steps = (int)(whole_stages(a.columns) / COLUMNS), count = (int)a.count, items = (int)a.items;
    const u32 mine = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);  // this warpgroup, which the compiler sees to be one for a warp
    const bool stays_behind = steps > STAGES - LEAD;  // of fewer steps the stages hold two tiles' arrivals at the named barrier
    int number = 0;  // of a stage, over all items
    if (mine == CONSUMERS) {
        release_registers<FOR_COPIES>();
        if (threadIdx.x == OF_CONSUMERS) {
            const int each = WIDE / blocks, from = rank * each, last = (int)((a.rows - 1) / HIGH);
            for (int item = begin; item < items; item += clusters) {
                const int place = item % count, entries = a.tiles[place].z, own = min(each, entries - from);
                const i64 row_tile = min(item / count * (int)blocks + (int)rank, last);
                const u16 *w = (const u16 *)a.w + row_tile * steps * HIGH * COLUMNS, *x = a.x + ((i64)place * steps * WIDE + from) * COLUMNS;
                for (int step = 0; step < steps; step++, number++) {
                    const int stage = number % STAGES;
                    u64 *full = &room.full[stage];
                    wait_for_phase(&room.empty[stage], number / STAGES % 2 ^ 1);
                    arrive_before(full, (HIGH + entries) * ENTRY);
                    copy_to_blocks(room.w[stage], w + (i64)step * HIGH * COLUMNS, HIGH * ENTRY, full, 1 << rank);
                    if (own > 0) copy_to_blocks(room.x[stage][from], x + (i64)step * WIDE * COLUMNS, own * ENTRY, full, (1 << blocks) - 1);
                }
            }
        }
        __syncwarp();  // its lanes come to the barrier of the cluster together
    } else {
        take_registers<FOR_PRODUCTS>();
        const auto give_back = [&](int stage) {  // to all blocks whose copies write it
            __syncwarp();
            if (threadIdx.x % 32 < blocks) arrive_at(&room.empty[stage % STAGES], threadIdx.x % 32);
        };
        for (int item = begin; item < items; item += clusters) {
            const i64 first = ((i64)(item / count) * blocks + rank) * HIGH;
            float sum[128];
#pragma unroll
            for (int i = 0; i < 128; i++) sum[i] = 0.0f;
            if (mine > 0 && stays_behind) sync_named(BEHIND, OF_CONSUMERS);
            for (int step = 0; step < steps; step++, number++) {
                const int stage = number % STAGES;
                wait_for_phase(&room.full[stage], number / STAGES % 2);
                const u64 w = operand_at(room.w[stage][mine * 64]), of_x = operand_at(room.x[stage]);
                wgmma_fence(sum);
#pragma unroll
                for (int k = 0; k < COLUMNS / 16; k++) wgmma(sum, w + STEP * k, of_x + STEP * k, T{});
                wgmma_commit();
                if (mine == 0 && stays_behind && step == LEAD - 1) arrive_named(BEHIND, OF_CONSUMERS);
                wgmma_wait<1>(sum);
                if (step > 0) give_back(number - 1);
            }
            wgmma_wait<0>(sum);
            give_back(number - 1);
            store_sums<T>(a, a.tiles[item % count], first, sum);
        }
    }
    sync_cluster();  // nobody arrives here any more
}
