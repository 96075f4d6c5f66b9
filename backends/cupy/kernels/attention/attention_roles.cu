// Many rows over keys and values of 16 bits by warps with roles: two warps bring keys, two bring values, and each of two
// warpgroups, the consumers, has 64 rows.
//
// Keys and values have rings of two stages.  A stage is `full` once its warps have brought it, and `empty` once all consumers
// have waited for the products that read it.  Consumers begin their products in turn, so that the softmax of one runs while
// tensor cores have the products of another (FlashAttention-3, Shah et al., 2024).

constexpr int PANEL = 64, STAGES = 2;  // columns that lie together in shared memory; stages of a ring
constexpr int CONSUMERS = 2, OF_ROWS = 64 * CONSUMERS, OF_CONSUMERS = 128 * CONSUMERS, OF_COPIERS = 64;
constexpr u32 FOR_COPIES = 40, FOR_PRODUCTS = 232;  // registers of a thread: those of the block are 65,536 at most
constexpr i32 IS_OPEN = 1, HAS_NEXT = 2, NO_TILE = -1;  // what a note says of a tile, besides four times its number
constexpr u32 TURN = 1;  // named barrier of the first consumer's turn

// Stages that some threads fill and others read.
template <int NUMBERS> struct Ring {
    u16 *stages;
    u64 *full, *empty;  // mbarriers

    __device__ __forceinline__ Ring(u16 *stages, u64 *mbarriers) : stages(stages), full(mbarriers), empty(mbarriers + STAGES) {}
    __device__ __forceinline__ void begin(u32 producers, u32 consumers) const {
        for (int s = 0; s < STAGES; s++) init_mbarrier(&full[s], producers), init_mbarrier(&empty[s], consumers);
    }
    __device__ __forceinline__ u16 *stage(int number) const { return stages + number % STAGES * NUMBERS; }
    __device__ __forceinline__ void wait_until_empty(int number) const { wait_for_phase(&empty[number % STAGES], number / STAGES % 2 ^ 1); }
    __device__ __forceinline__ void wait_until_full(int number) const { wait_for_phase(&full[number % STAGES], number / STAGES % 2); }
    // This thread's copies to the stage become visible to products.
    __device__ __forceinline__ void hand_over(int number) const {
        cp_async_commit();
        cp_async_wait<0>();
        show_to_products();
        arrive_at(&full[number % STAGES], 0);
    }
    // A warp has waited for its products that read the stage.
    __device__ __forceinline__ void give_back(int number) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive_at(&empty[number % STAGES], 0);
    }
};

// As Many::fetch, by OF_COPIERS threads: a tile in panels; keys past the last one are the last one again.
template <int COLUMNS, int KEYS, class Cell>
__device__ __forceinline__ void bring(u16 *tile, const Tiles &x, const Cell *from, const View &by, int first, int there) {
    const int sub = threadIdx.x % 8, begin = threadIdx.x % OF_COPIERS / 8, last_key = (int)x.a.keys - 1;
#pragma unroll 2
    for (int row = begin; row < KEYS; row += OF_COPIERS / 8) {
        const Cell *cells = from + min(first + row, last_key) * by.row;
        u16 *to = tile + chunk(row, sub, PANEL);
        if (x.vectors) {
#pragma unroll
            for (int c = 0; c < COLUMNS / PANEL; c++)
                if (8 * sub + PANEL * c < there) cp_async_16(to + c * KEYS * PANEL, cells + 8 * sub + PANEL * c);
        } else {
#pragma unroll 1
            for (int i = 0; i < COLUMNS / 8; i++) {
                const int column = 8 * sub + i / 8 * PANEL + i % 8;
                to[i / 8 * KEYS * PANEL + i % 8] = column < there ? cells[column * by.column].bits : (u16)0;
            }
        }
    }
}

template <class Cell, int D, int E, int KEYS> __global__ void __launch_bounds__(OF_CONSUMERS + 128, 1) attend_roles(const __grid_constant__ Tiles x) {
    wait_for_earlier();
    const Args &a = x.a;
    DYNAMIC_SHARED(memory, u8);
    u16 *k = aligned<u16>(memory), *v = k + STAGES * KEYS * D, *q = v + STAGES * KEYS * E;
    Bias *biases = (Bias *)(q + OF_ROWS * D);
    u64 *mbarriers = (u64 *)(biases + OF_ROWS);
    i32 *notes = (i32 *)(mbarriers + 4 * STAGES);  // of the tiles in the stages of keys
    const Ring<KEYS * D> key_ring(k, mbarriers);
    const Ring<KEYS * E> value_ring(v, mbarriers + 2 * STAGES);
    if (threadIdx.x == 0) key_ring.begin(OF_COPIERS, 4 * CONSUMERS), value_ring.begin(OF_COPIERS, 4 * CONSUMERS);
    if (a.size < D) {  // columns that no key has
        for (int i = threadIdx.x; i < STAGES * KEYS * D / 8; i += OF_CONSUMERS + 128) *(uint4 *)(k + 8 * i) = make_uint4(0, 0, 0, 0);
        show_to_products();
    }
    __syncthreads();

    Many<Cell, KEYS, 4 * CONSUMERS> many(x);
    const u32 mine = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);  // this warpgroup, which the compiler sees to be one for a warp
    if (mine == CONSUMERS) {
        release_registers<FOR_COPIES>();
        const int tiles = (int)x.tiles;
        const auto each_tile = [&](auto bring) {  // at least once, also without a tile
            auto coming = many.coming();
            bool open;
            int tile = coming.next(open);
            for (int number = 0; number == 0 || tile < tiles; number++) {
                const i32 note = tile < tiles ? tile * 4 + (open ? IS_OPEN : 0) : NO_TILE;
                tile = coming.next(open);
                bring(number, note, tile < tiles ? HAS_NEXT : 0);
            }
        };
        if (threadIdx.x < OF_CONSUMERS + OF_COPIERS) {
            each_tile([&](int number, i32 note, i32 has_next) {
                key_ring.wait_until_empty(number);
                if (threadIdx.x == OF_CONSUMERS) notes[number % STAGES] = note | has_next;
                if (note != NO_TILE) bring<D, KEYS>(key_ring.stage(number), x, many.keys, a.k, note / 4 * KEYS, (int)a.size);
                key_ring.hand_over(number);
            });
        } else {
            each_tile([&](int number, i32 note, i32) {
                if (note == NO_TILE) return;
                value_ring.wait_until_empty(number);
                bring<E, KEYS>(value_ring.stage(number), x, many.values, a.v, note / 4 * KEYS, (int)a.width);
                value_ring.hand_over(number);
            });
        }
        return;
    }

    take_registers<FOR_PRODUCTS>();
    // `split_row` goes D numbers from row to row and 64 from panel to panel.
    many.template take_queries<D>([&](int row, int c) { return q + c / 8 * PANEL * (OF_ROWS - 1) - row * (D - PANEL); });
    many.note_biases(biases);
    show_to_products();  // behind this warpgroup's first turn

    float s[KEYS / 2], acc[E / 2] = {};
    float(*scores)[4] = (float(*)[4])s, (*sums)[4] = (float(*)[4])acc;
    u32 weights[KEYS / 16][4];
    const u64 queries = operand_at(q + mine * 64 * PANEL);
    const auto begin_scores = [&](int number) {
        multiply_panels<D, OF_ROWS, KEYS>(s, queries, operand_at(key_ring.stage(number)), Cell{});
        wgmma_commit();
    };
    const auto begin_sums = [&](int number) {
        const u64 of_values = operand_at(value_ring.stage(number), KEYS * PANEL * sizeof(u16));
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) wgmma(acc, weights[n], of_values + 16 * n * ROW, Cell{});
        wgmma_commit();
    };
    const auto await_turn = [&] { sync_named(TURN + mine, 256); };
    const auto pass_turn = [&](i32 note) {  // nobody waits for the turn behind the last one
        if (mine + 1 < CONSUMERS || note & HAS_NEXT) arrive_named(TURN + (mine + 1) % CONSUMERS, 256);
    };

    Powers<KEYS, false, 0> powers;
    key_ring.wait_until_full(0);
    i32 note = notes[0];
    if (note != NO_TILE) {
        if (mine + 1 == CONSUMERS) arrive_named(TURN, 256);
        await_turn();
        wgmma_fence(acc);
        begin_scores(0);
        wgmma_commit();  // no sums yet
        pass_turn(note);
        for (int number = 0;; number++) {
            float fade[2];
            wgmma_wait<1>(s);
            key_ring.give_back(number);
            many.weigh(scores, powers, fade, biases, note / 4 * KEYS, note & IS_OPEN);
            wgmma_wait<0>(acc);
            if (number > 0) value_ring.give_back(number - 1);
            many.template fade_all<E>(sums, fade);
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) many.pack(scores + 2 * n, weights[n]);
            if (!(note & HAS_NEXT)) {
                value_ring.wait_until_full(number);
                wgmma_fence(acc);
                begin_sums(number);
                wgmma_wait<0>(acc);
                break;
            }
            key_ring.wait_until_full(number + 1);
            note = notes[(number + 1) % STAGES];
            await_turn();
            wgmma_fence(acc);
            begin_scores(number + 1);
            value_ring.wait_until_full(number);
            wgmma_fence(acc);
            begin_sums(number);
            pass_turn(note);
        }
    }
    many.template store<E>(sums, powers);
}
