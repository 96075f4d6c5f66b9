// Products of many tokens by warpgroups, in the terms of tiled.cu, which stands before.  A block has 256 rows of weights and 128 entries, of which each of
// its two warpgroups multiplies 64 with all rows, beside the threads that bring the next stages and unpack weights.
//
// A stage is written over when the product of the one before the last is over: every warp waits for that before a barrier,
// and the last product is still under way.

constexpr int ROWS = 256, ENTRIES = 128, COLUMNS = 64, THREADS = 256, PIECES = COLUMNS / 8, BELOW = THREADS / PIECES;
template <class W> struct Grouped : Product<W> {
    float4 *parts;  // what blocks that share the columns of a tile have for each other, or null
    u32 *numbers;   // for each tile 0, before the launch and behind it
};
template <int TERMS> struct Stage {
    u16 w[ROWS][COLUMNS], x[TERMS][ENTRIES][COLUMNS];
};

// Blocks that share columns leave their sums for each other; whoever comes last adds all of them up, in order.  `number` is
// shared memory that is free once all products are over.
template <class A> __device__ __forceinline__ bool has_all(const A &a, float (&sum)[128], u32 &number) {
    constexpr i64 EACH = 128 / 4 * THREADS;
    const i64 tile = (i64)blockIdx.y * gridDim.x + blockIdx.x;
    float4 *all = a.parts + gridDim.z * tile * EACH + threadIdx.x, *mine = all + blockIdx.z * EACH;
#pragma unroll
    for (int i = 0; i < 128; i += 4) mine[i / 4 * THREADS] = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    __syncthreads();  // all sums are left, and no product reads a stage
    if (threadIdx.x == 0) number = take_number(&a.numbers[tile]);
    __syncthreads();
    if (number + 1 < gridDim.z) return false;
    if (threadIdx.x == 0) a.numbers[tile] = 0;
#pragma unroll
    for (int i = 0; i < 128; i++) sum[i] = 0.0f;
    for (u32 share = 0; share < gridDim.z; share++)
#pragma unroll
        for (int i = 0; i < 128; i += 4) {
            const float4 v = all[share * EACH + i / 4 * THREADS];
            sum[i] += v.x, sum[i + 1] += v.y, sum[i + 2] += v.z, sum[i + 3] += v.w;
        }
    return true;
}

template <class T, int TERMS> struct Block {
    static constexpr int OF_X = ENTRIES / BELOW;  // pieces of a term that a thread brings
    float sum[ROWS / 2];
    const u16 *from[OF_X];
    i64 width;
    const int *slots, *rows;

    template <class A>
    __device__ __forceinline__ Block(const A &a, const int4 &tile, int *slots, int *rows) : width(whole_stages(a.columns)), slots(slots), rows(rows) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) sum[i] = 0.0f;
        if (threadIdx.x < ENTRIES) {
            const int entry = tile.y + min((int)threadIdx.x, tile.z - 1), slot = a.order ? a.order[entry] : entry;
            slots[threadIdx.x] = slot;
            rows[threadIdx.x] = (i32)row_of(slot, a.used, a.shared);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OF_X; i++) from[i] = a.x + (i64)rows[threadIdx.x / PIECES + i * BELOW] * TERMS * width + threadIdx.x % PIECES * 8;
    }
    __device__ __forceinline__ void fetch(Stage<TERMS> &to, i64 start) const {
        const int row = threadIdx.x / PIECES, place = swizzled(row, threadIdx.x % PIECES);
#pragma unroll
        for (int i = 0; i < OF_X; i++)
#pragma unroll
            for (int term = 0; term < TERMS; term++) cp_async_16(&to.x[term][row + i * BELOW][place], from[i] + term * width + start);
    }
    // Begins the products of a stage; a warpgroup has 64 entries.
    __device__ __forceinline__ void add(const Stage<TERMS> &stage) {
        const u64 w = operand_at(stage.w);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++)
#pragma unroll
            for (int term = TERMS - 1; term >= 0; term--)  // small terms first
                wgmma(sum, operand_at(stage.x[term][threadIdx.x / 128 * 64]) + STEP * k, w + STEP * k, T{});
        wgmma_commit();
    }
    template <class A> __device__ __forceinline__ void store(const A &a, const int4 &tile, i64 first) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const bool pairs = (((u64)a.out | (u64)a.out_step * 4) & 7) == 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int entry = threadIdx.x / 32 * 16 + 8 * h + g;
            if (entry >= tile.z) continue;
            float *out = a.out + slots[entry] * a.out_step + first;
            const float undo = IS_SCALED<T> ? a.undo[rows[entry]] : 1.0f;
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++) {
                const int row = 8 * j + 2 * t;
                const float2 both = make_float2(sum[4 * j + 2 * h] * undo, sum[4 * j + 2 * h + 1] * undo);
                if (pairs && first + row + 1 < a.rows) {
                    *(float2 *)(out + row) = both;
                } else {
                    if (first + row < a.rows) out[row] = both.x;
                    if (first + row + 1 < a.rows) out[row + 1] = both.y;
                }
            }
        }
    }
};

// Weights of 16 bits come with x.
template <class T, int MOST = ROWS> struct Dense {
    using Of = T;
    const T *w;
    i64 step, columns, rows;  // of those from `w` on
    bool is_aligned;

    __device__ __forceinline__ Dense(const Product<T> &a, i64 matrix, i64 first, i64)
        : w(a.w + matrix * a.matrix_step + first * a.row_step), step(a.row_step), columns(a.columns), rows(a.rows - first) {
        is_aligned = (((u64)w | (u64)step * sizeof(T)) & 15) == 0;
    }
    template <class S> __device__ __forceinline__ void fetch(S &to, i64 start) const {
        const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES, place = swizzled(row, piece);
        const i64 column = start + 8 * piece;
        if (is_aligned && rows >= MOST && start + COLUMNS <= columns) {
            const T *from = w + row * step + column;
#pragma unroll
            for (int i = 0; i < MOST; i += BELOW) cp_async_16(&to.w[row + i][place], from + i * step);
        } else {
#pragma unroll 1
            for (int i = 0; i < MOST; i += BELOW) bring(&to.w[row + i][place], w + min((i64)row + i, rows - 1) * step, column, columns);
        }
    }
    template <class S> __device__ __forceinline__ void begin(S &, i64) {}
    template <class S> __device__ __forceinline__ void next(int, S &, i64) {}
};
// Packed weights come to registers two stages before they are multiplied, and are unpacked while the one before is.  A
// thread has a row, a warp a unit.
template <class F> struct Packed {
    using Of = u8;
    Unit<F> unit;
    i64 end;
    RowCodes<F> codes[2][2];  // of two stages, the halves of their columns
    typename F::OfBlock records[2][2];

    __device__ __forceinline__ Packed(const Product<u8> &a, i64 matrix, i64 first, i64 end) : end(end) {
        const i64 number = min(first / 32 + threadIdx.x / 32, a.matrix_step - 1);
        unit = Unit<F>(a.w, matrix * a.matrix_step + number, a.columns / 32, a.row_step);
    }
    template <class S> __device__ __forceinline__ void fetch(S &, i64) const {}
    template <class S> __device__ __forceinline__ void begin(S &to, i64 start) {
        load(0, start);
        load(1, start + COLUMNS);
        next(0, to, start);
    }
    // Unpacks a stage, and loads the one behind the next.
    template <class S> __device__ __forceinline__ void next(int parity, S &to, i64 start) {
        unpack(parity, to, start);
        load(parity, start + 2 * COLUMNS);
    }
    __device__ __forceinline__ void load(int parity, i64 start) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const i64 block = start / 32 + half;
            if (32 * block >= end) continue;
            codes[parity][half].load(unit, block, 0, lane);
            records[parity][half].load(unit.records, unit.count, block, lane);
        }
    }
    template <class S> __device__ __forceinline__ void unpack(int parity, S &to, i64 start) const {
        if (start >= end) return;
        const int row = threadIdx.x;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const i64 block = start / 32 + half;
            u32 words[16] = {};
            if (32 * block < end) unpack_row<F>(words, codes[parity][half], F::scales(records[parity][half], (int)(block % F::SUPER)));
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(uint4 *)&to.w[row][swizzled(row, 4 * half + i)] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
    }
};

template <class T, int TERMS, int STAGES, class W> __device__ __forceinline__ void multiply_tile(const Grouped<typename W::Of> &a) {
    constexpr int AHEAD = STAGES - 2;
    DYNAMIC_SHARED(room, u8);
    SHARED(slots, int[ENTRIES]);
    SHARED(rows, int[ENTRIES]);
    const int4 tile = a.tiles[blockIdx.x];
    if (tile.z == 0) return;
    auto *stages = aligned<Stage<TERMS>>(room);
    const i64 first = (i64)blockIdx.y * ROWS, begin = blockIdx.z * a.run, end = min(begin + a.run, a.columns);
    Block<T, TERMS> block(a, tile, slots, rows);
    if (tile.x >= 0) {
        W weights(a, tile.x, first, end);
        auto fetch = [&](Stage<TERMS> &to, i64 start) {
            if (start < end) block.fetch(to, start), weights.fetch(to, start);
            cp_async_commit();
        };
#pragma unroll
        for (int s = 0; s < AHEAD; s++) fetch(stages[s], begin + s * COLUMNS);
        weights.begin(stages[0], begin);
        int now = 0;
        auto step = [&](int parity, i64 start) {  // of the next stage
            cp_async_wait<AHEAD - 1>();
            show_to_products();
            __syncthreads();  // this stage is there, and the product of the one before the last is over
            block.add(stages[now]);
            fetch(stages[(now + AHEAD) % STAGES], start + AHEAD * COLUMNS);
            weights.next(parity, stages[(now + 1) % STAGES], start + COLUMNS);
            wgmma_wait<1>(block.sum);
            now = (now + 1) % STAGES;
        };
        for (i64 start = begin; start < end; start += 2 * COLUMNS) {
            step(1, start);
            if (start + COLUMNS < end) step(0, start + COLUMNS);
        }
        wgmma_wait<0>(block.sum);
    }
    if (a.parts == nullptr || has_all(a, block.sum, *(u32 *)stages)) block.store(a, tile, first);
}
template <class T, int TERMS> __global__ void __launch_bounds__(THREADS) grouped(const __grid_constant__ Grouped<T> a) {
    wait_for_earlier();
    multiply_tile<T, TERMS, TERMS == 1 ? 4 : 3, Dense<T>>(a);
}
template <class F> __global__ void __launch_bounds__(THREADS) grouped_packed(const __grid_constant__ Grouped<u8> a) {
    wait_for_earlier();
    F::load_book();  // there is a barrier before the first weights are unpacked
    multiply_tile<bf16_bits, 1, 4, Packed<F>>(a);
}

// All of a matrix as bfloat16, for products of so many tokens that weights are better unpacked once for all of them.  A warp
// has a unit and four blocks of columns: a lane unpacks a row of them, and a row is written by half a warp.
struct Unpacked {
    const u8 *w;
    u16 *out;
    i64 rows, blocks, row_bytes;
};
template <class F> __global__ void __launch_bounds__(128) unpacked(const __grid_constant__ Unpacked a) {
    wait_for_earlier();
    constexpr int EACH = 4, LINE_PIECES = 4 * EACH;
    SHARED(lines, uint4[4][32][LINE_PIECES]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = (int)(blockIdx.x * 4 + warp) * EACH, blocks = (int)a.blocks;
    const Unit<F> unit(a.w, blockIdx.y, a.blocks, a.row_bytes);
    if (F::BOOK) {
        F::load_book();
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (first + i >= blocks) break;
        RowCodes<F> codes;
        typename F::OfBlock record;
        codes.load(unit, first + i, 0, lane);
        record.load(unit.records, unit.count, first + i, lane);
        u32 words[16];
        unpack_row<F>(words, codes, F::scales(record, (first + i) % F::SUPER));
#pragma unroll
        for (int j = 0; j < 4; j++)
            lines[warp][lane][(4 * i + j) ^ lane % LINE_PIECES] = make_uint4(words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
    }
    __syncwarp();
    const int piece = lane % LINE_PIECES;
    if (first + piece / 4 >= blocks) return;
#pragma unroll
    for (int r = lane / LINE_PIECES; r < 32; r += 32 / LINE_PIECES) {
        const i64 row = (i64)blockIdx.y * 32 + r;
        if (row < a.rows) *(uint4 *)(a.out + (row * a.blocks + first) * 32 + 8 * piece) = lines[warp][r][piece ^ r % LINE_PIECES];
    }
}
