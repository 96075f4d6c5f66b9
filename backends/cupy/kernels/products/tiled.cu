// Products of many tokens: what is multiplied becomes sums of 16-bit numbers, for tensor cores that add in float32.
//
// split_rows takes x apart, once for all blocks.  Weights of 16 bits are one term, as they lie in memory, and x is two of
// the same type, which leaves 2^-17 of a number out (bfloat16) or 2^-22 (half); half has few exponents, so that each row of
// x is scaled by a power of two, and its results back.  Packed weights become bfloat16 on their way to shared memory, and
// x is one term: of the 8 bits to which packed.cu rounds x either has one more.
//
// Both operands of a block come to shared memory in stages, some columns of all its rows and entries; while one is
// multiplied the next are on their way.  The larger a tile the less is asked of the second cache, which sets the time of
// terms of 16 bits: where large tiles are too few for a device, two blocks share the columns of each.

// ------------------------------------------------------------------------------------------------------ terms of x

struct Split {
    const float *x;
    i64 step, columns;
    u16 *terms;   // [rows][TERMS][columns, up to a multiple of 64 with zeros]
    float *undo;  // [rows]: what a result is multiplied by, where rows are scaled
};
template <class T> constexpr bool IS_SCALED = false;
template <> constexpr bool IS_SCALED<half_bits> = true;
constexpr int WIDEST = 64;  // columns of a stage
__device__ __forceinline__ i64 whole_stages(i64 columns) { return (columns + WIDEST - 1) / WIDEST * WIDEST; }

// To the nearest; a number stays one.
__device__ __forceinline__ u16 nearest(float x, bf16_bits) {
    const u16 bits = float_to_bf16(x);
    return (bits & 0x7fff) == 0x7f80 && fabsf(x) < INFINITY ? bits - 1 : bits;
}
__device__ __forceinline__ u16 nearest(float x, half_bits) { return float_to_half(x); }
// The largest number of a row becomes one from 2^14 to 2^15.
__device__ __forceinline__ float scale_of(float top) {
    const int exponent = (int)(__float_as_uint(top) >> 23) - 127;
    return __uint_as_float((u32)(127 + min(14 - exponent, 126)) << 23);
}
// Takes a row of x apart, four columns at a time; `place` says where those of a term go, of which 0 is the largest.
template <class T, int TERMS, class Place> __device__ __forceinline__ void split_row(const Split &a, Place place) {
    SHARED(room, float[32]);
    const float *x = a.x + blockIdx.x * a.step;
    float up = 1.0f;
    if (IS_SCALED<T>) {
        float top = 0.0f;
        each_column(a.columns, [&](i64 c) { return x[c]; }, [&](i64, float v) { top = fmaxf(top, fabsf(v) < INFINITY ? fabsf(v) : 0.0f); });
        up = scale_of(block_max(top, room));
        if (threadIdx.x == 0) a.undo[blockIdx.x] = 1.0f / up;
    }
    const bool aligned = ((u64)x & 15) == 0;
    for (i64 c = 4 * ((i64)blockIdx.y * blockDim.x + threadIdx.x); c < whole_stages(a.columns); c += 4 * (i64)gridDim.y * blockDim.x) {
        float4 v = make_float4(0, 0, 0, 0);
        if (aligned && c + 4 <= a.columns) {
            v = *(const float4 *)(x + c);
        } else {
            if (c < a.columns) v.x = x[c];
            if (c + 1 < a.columns) v.y = x[c + 1];
            if (c + 2 < a.columns) v.z = x[c + 2];
            if (c + 3 < a.columns) v.w = x[c + 3];
        }
        float rest[4] = {v.x * up, v.y * up, v.z * up, v.w * up};
#pragma unroll
        for (int term = 0; term < TERMS; term++) {
            u32 bits[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bits[i] = nearest(rest[i], T{});
                rest[i] = fabsf(rest[i]) < INFINITY ? rest[i] - to_float(T{(u16)bits[i]}) : 0.0f;
            }
            *(uint2 *)place(term, c) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
        }
    }
}
template <class T, int TERMS> __global__ void __launch_bounds__(1024) split_rows(const __grid_constant__ Split a) {
    wait_for_earlier();
    const i64 width = whole_stages(a.columns);
    u16 *terms = a.terms + blockIdx.x * TERMS * width;
    split_row<T, TERMS>(a, [&](int term, i64 c) { return terms + term * width + c; });
}

// ----------------------------------------------------------------------------------------------------------- tiles

template <class W> struct Product {
    const W *w;
    const u16 *x;       // as split_rows leaves it
    const float *undo;  // as well
    float *out;
    i64 columns, rows;
    i64 matrix_step, row_step;  // between floats; of packed weights a matrix in units, and a row in bytes
    i64 out_step;
    const int4 *tiles;  // as of packed.cu: matrix, first entry, entries
    const i32 *order;
    i64 used, shared;
    i64 run, part_step;  // columns of a block, and floats between the results of those that share them
};
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 *w, const u32 *x, bf16_bits) { mma_bf16(sum, w, x); }
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 *w, const u32 *x, half_bits) { mma_f16(sum, w, x); }

// Of ROWS rows by ENTRIES entries; a warp has HIGH by WIDE of them.
template <int ROWS_, int ENTRIES_, int HIGH_, int WIDE_> struct Sizes {
    static constexpr int ROWS = ROWS_, ENTRIES = ENTRIES_, HIGH = HIGH_, WIDE = WIDE_;
    static constexpr int BELOW = ROWS / HIGH, THREADS = 32 * BELOW * (ENTRIES / WIDE);  // warps below each other; of a block
};
template <class T, class S, int TERMS, int COLUMNS> struct Tile {
    static constexpr int PITCH = COLUMNS + 8;  // 80 or 144 bytes: eight rows lie in different banks
    static constexpr int DOWN = S::HIGH / 16, RIGHT = S::WIDE / 16, PIECES = COLUMNS / 8;
    static constexpr int OF_X = TERMS * S::ENTRIES * PIECES / S::THREADS;
    using Weights = u16[S::ROWS][PITCH];
    using Terms = u16[TERMS][S::ENTRIES][PITCH];
    float sum[DOWN][2 * RIGHT][4];
    const u16 *from[OF_X];  // the pieces of 16 bytes of a stage that this thread brings
    int4 tile;
    const int *slots, *rows;

    // `slots` and `rows` have room for all entries.
    template <class A> __device__ __forceinline__ Tile(const A &a, const int4 &tile, int *slots, int *rows) : tile(tile), slots(slots), rows(rows) {
#pragma unroll
        for (int i = 0; i < 8 * RIGHT * DOWN; i++) sum[i / (8 * RIGHT)][i / 4 % (2 * RIGHT)][i % 4] = 0.0f;
        if (threadIdx.x < S::ENTRIES) {
            const int entry = tile.y + min((int)threadIdx.x, tile.z - 1), slot = a.order ? a.order[entry] : entry;
            slots[threadIdx.x] = slot;
            rows[threadIdx.x] = (i32)row_of(slot, a.used, a.shared);
        }
        __syncthreads();
        const i64 width = whole_stages(a.columns);
#pragma unroll
        for (int i = 0; i < OF_X; i++) {
            const int p = threadIdx.x + i * S::THREADS, row = p / PIECES;
            from[i] = a.x + ((i64)rows[row % S::ENTRIES] * TERMS + row / S::ENTRIES) * width + p % PIECES * 8;
        }
    }
    __device__ __forceinline__ void fetch(Terms &to, i64 start) const {
#pragma unroll
        for (int i = 0; i < OF_X; i++) {
            const int p = threadIdx.x + i * S::THREADS, row = p / PIECES;
            cp_async_16(&to[row / S::ENTRIES][row % S::ENTRIES][p % PIECES * 8], from[i] + start);
        }
    }
    static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 % S::BELOW * S::HIGH; }
    static __device__ __forceinline__ int first_entry() { return threadIdx.x / 32 / S::BELOW * S::WIDE; }
    __device__ __forceinline__ void add(const Weights &w, const Terms &x) {
        const int lane = threadIdx.x % 32;
        if (first_entry() >= tile.z) return;  // a whole warp
#pragma unroll
        for (int k = 0; k < COLUMNS; k += 16) {
            u32 of_w[DOWN][4], of_x[RIGHT][4];
#pragma unroll
            for (int r = 0; r < DOWN; r++) ldmatrix_x4(of_w[r], &w[first_row() + 16 * r + lane % 16][k + lane / 16 * 8]);
            // Small terms first.
#pragma unroll
            for (int term = TERMS - 1; term >= 0; term--) {
#pragma unroll
                for (int j = 0; j < RIGHT; j++)
                    ldmatrix_x4(of_x[j], &x[term][first_entry() + 16 * j + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
#pragma unroll
                for (int r = 0; r < DOWN; r++)
#pragma unroll
                    for (int j = 0; j < 2 * RIGHT; j++) multiply(sum[r][j], of_w[r], of_x[j / 2] + j % 2 * 2, T{});
            }
        }
    }
    template <class A> __device__ __forceinline__ void store(const A &a, float *to, i64 first) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4 * RIGHT; i++) {
            const int entry = first_entry() + i / 2 * 8 + 2 * t + i % 2;
            if (entry >= tile.z) continue;
            float *out = to + slots[entry] * a.out_step;
            const float undo = IS_SCALED<T> ? a.undo[rows[entry]] : 1.0f;
#pragma unroll
            for (int r = 0; r < 2 * DOWN; r++) {
                const i64 row = first + first_row() + 8 * r + g;
                if (row < a.rows) out[row] = sum[r / 2][i / 2][r % 2 * 2 + i % 2] * undo;
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------- weights of 16 bits

// Eight columns of a row; zeros from `columns` on.
template <class T> __device__ __forceinline__ void bring(u16 *to, const T *row, i64 column, i64 columns) {
    if (((u64)row & 15) == 0 && column + 8 <= columns) return cp_async_16(to, row + column);
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = column + i < columns ? row[column + i].bits : 0;
}
template <class T, class S> __global__ void __launch_bounds__(S::THREADS) tiled(const __grid_constant__ Product<T> a) {
    wait_for_earlier();
    constexpr int COLUMNS = 32, STAGES = 3, OF_W = S::ROWS * COLUMNS / 8 / S::THREADS;
    using Block = Tile<T, S, 2, COLUMNS>;
    struct Stage {
        typename Block::Weights w;
        typename Block::Terms x;
    };
    DYNAMIC_SHARED(stages, Stage);
    SHARED(slots, int[S::ENTRIES]);
    SHARED(rows, int[S::ENTRIES]);
    const int4 tile = a.tiles[blockIdx.x];
    if (tile.z == 0) return;
    const i64 first = (i64)blockIdx.y * S::ROWS, begin = blockIdx.z * a.run, end = min(begin + a.run, a.columns);
    Block block(a, tile, slots, rows);
    if (tile.x >= 0) {
        const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 8;  // and every S::THREADS / 4 rows below
        const T *w[OF_W];
#pragma unroll
        for (int i = 0; i < OF_W; i++)
            w[i] = a.w + tile.x * a.matrix_step + min(first + row + i * (S::THREADS / 4), a.rows - 1) * a.row_step;
        auto fetch = [&](Stage &to, i64 start) {
            if (start < end) {
                block.fetch(to.x, start);
#pragma unroll
                for (int i = 0; i < OF_W; i++) bring(&to.w[row + i * (S::THREADS / 4)][column], w[i], start + column, a.columns);
            }
            cp_async_commit();
        };
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) fetch(stages[s], begin + s * COLUMNS);
        int now = 0;
        for (i64 start = begin; start < end; start += COLUMNS) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // this stage is there, and nobody reads the one before
            fetch(stages[now == 0 ? STAGES - 1 : now - 1], start + (STAGES - 1) * COLUMNS);
            block.add(stages[now].w, stages[now].x);
            now = now + 1 == STAGES ? 0 : now + 1;
        }
    }
    block.store(a, a.out + blockIdx.z * a.part_step, first);
}
// What the blocks that share columns have, added in order.
struct Shares {
    const float *parts;  // [shares][entries][rows]
    float *out;
    i64 shares, part_step, rows, out_step;
};
__global__ void __launch_bounds__(256) add_shares(const __grid_constant__ Shares a) {
    wait_for_earlier();
    const i64 row = 4 * ((i64)blockIdx.y * blockDim.x + threadIdx.x), entry = blockIdx.x;
    const float *from = a.parts + entry * a.rows + row;
    float *to = a.out + entry * a.out_step + row;
    if (row + 4 <= a.rows && ((a.rows | a.out_step) & 3) == 0 && ((u64)a.out & 15) == 0) {
        float4 sum = make_float4(0, 0, 0, 0);
        for (i64 i = 0; i < a.shares; i++) {
            const float4 v = *(const float4 *)(from + i * a.part_step);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        *(float4 *)to = sum;
        return;
    }
    for (i64 r = 0; r < 4 && row + r < a.rows; r++) {
        float sum = 0.0f;
        for (i64 i = 0; i < a.shares; i++) sum += from[i * a.part_step + r];
        to[r] = sum;
    }
}

// -------------------------------------------------------------------------------------------------- packed weights

// The 32 weights of a row and block, as pairs of bfloat16.
template <class F> __device__ __forceinline__ void unpack_row(u32 (&to)[16], const RowCodes<F> &codes, const Scales &own) {
    const Scales s = F::scaled(own, codes.at(0));
    constexpr float BASE = F::BIAS ? 8388608.0f : 8388736.0f;  // 2^23, and 128 for what makes signed codes unsigned
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int h = i / 4, part = F::HALVES ? h : 0;
        const u32 q = F::codes(codes.at(i % 4), h) ^ (F::BIAS ? 0 : 0x80808080u);
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float code = __uint_as_float(__byte_perm(q, 0x4b000000u, 0x7650 + e)) - BASE;
            v[e] = F::BIAS ? fmaf(code, s.scale[part], s.bias[part]) : code * s.scale[part];
        }
        to[2 * i] = pack_bf16(v[0], v[1]), to[2 * i + 1] = pack_bf16(v[2], v[3]);
    }
}
// Codes come two stages ahead, to registers, and are unpacked to shared memory just before they are multiplied; x comes
// two stages ahead, too.
template <class F> __global__ void __launch_bounds__(256) tiled_packed(const __grid_constant__ Product<u8> a) {
    wait_for_earlier();
    constexpr int COLUMNS = 64;
    using S = Sizes<128, 128, 64, 32>;
    using Block = Tile<bf16_bits, S, 1, COLUMNS>;
    struct Stages {
        typename Block::Weights w[2];
        typename Block::Terms x[3];
    };
    DYNAMIC_SHARED(stages, Stages);
    SHARED(slots, int[S::ENTRIES]);
    SHARED(rows, int[S::ENTRIES]);
    const int4 tile = a.tiles[blockIdx.x];
    if (tile.z == 0) return;
    const i64 first = (i64)blockIdx.y * S::ROWS;
    F::load_book();  // for all threads from the barrier of the next line on
    Block block(a, tile, slots, rows);
    if (tile.x >= 0) {
        // A warp brings a block of 32 columns of a unit of 32 rows.
        const i64 blocks = a.columns / 32, number = first / 32 + threadIdx.x / 64;
        const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2, row = threadIdx.x / 64 * 32 + lane;
        const Unit<F> unit(a.w, tile.x * a.matrix_step + min(number, a.matrix_step - 1), blocks, a.row_step);
        RowCodes<F> codes[2];
        typename F::OfBlock records[2];
        auto fetch = [&](int parity, typename Block::Terms &x, i64 start) {
            const i64 mine = start / 32 + half;
            if (mine < blocks) codes[parity].load(unit, mine, 0, lane), records[parity].load(unit.records, unit.count, mine, lane);
            if (start < a.columns) block.fetch(x, start);
            cp_async_commit();
        };
        int now = 0;
        auto step = [&](int parity, i64 start) {
            const i64 mine = start / 32 + half;
            u32 words[16] = {};
            if (mine < blocks) unpack_row<F>(words, codes[parity], F::scales(records[parity], (int)(mine % F::SUPER)));
#pragma unroll
            for (int i = 0; i < 16; i += 4)
                *(uint4 *)&stages->w[parity][row][32 * half + 2 * i] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
            cp_async_wait<1>();
            __syncthreads();  // this stage is there, and nobody reads the one before
            fetch(parity, stages->x[now == 0 ? 2 : now - 1], start + 2 * COLUMNS);
            block.add(stages->w[parity], stages->x[now]);
            now = now == 2 ? 0 : now + 1;
        };
        fetch(0, stages->x[0], 0);
        fetch(1, stages->x[1], COLUMNS);
        for (i64 start = 0; start < a.columns; start += 2 * COLUMNS) {
            step(0, start);
            if (start + COLUMNS < a.columns) step(1, start + COLUMNS);
        }
    }
    block.store(a, a.out, first);
}
