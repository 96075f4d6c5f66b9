// Products of many tokens with packed weights, but for those that fill large tiles: see tiled.cu.  Rows of packed tables.

struct Round {
    const float *x;
    i64 step, rows, blocks;
    u32 *codes;      // [rows][columns / 4]
    float4 *scales;  // [rows][blocks]
};
__global__ void __launch_bounds__(256) round_rows(const __grid_constant__ Round a) {
    wait_for_earlier();
    const i64 chunks = (a.blocks + 7) / 8, i = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (i >= a.rows * chunks) return;  // a whole warp
    const i64 row = i / chunks, block = i % chunks * 8, mine = block + threadIdx.x % 32 / 4;
    float4 x[2];
    bring(x, a.x + row * a.step, (int)block, (int)a.blocks);
    const Rounded r = round_block(x);
    if (mine >= a.blocks) return;
    u32 *codes = a.codes + (row * a.blocks + mine) * 8 + threadIdx.x % 4;
    codes[0] = r.codes[0], codes[4] = r.codes[1];
    if (threadIdx.x % 4 == 0) a.scales[row * a.blocks + mine] = r.scale;
}

// ----------------------------------------------------------------------------------------------------- many tokens

struct Many {
    const u8 *w;
    const i8 *codes;
    const float4 *scales;
    float *out;
    i64 blocks, row_bytes, units, rows, out_step;
    const int4 *tiles;  // matrix (-1: elsewhere, the result is 0), first entry, entries (0: nothing to do)
    const i32 *order;   // of entries, or null
    i64 used, shared;
};
// A block makes 32 WR rows of up to 8 G entries; WK warps share the columns of its rows.  Rounded activations come to
// shared memory two stages deep, weights from memory straight to the registers of the warp that multiplies them: their
// layout is that of the fragments.
//
// An mma of 16 x 32 x 8 costs a warp 8 fma (12 with a bias) besides, its share of loads about 2 more: 8192 operations in 11
// to 15 issue slots, or 500 to 700 TFLOPS on an H200, less than half of what its tensor cores could do with integers.
template <class F, int G, int WR, int WK> struct Tile {
    static constexpr int STEP = WK > 1 ? 8 : 4, ENTRIES = 8 * G, THREADS = 32 * WR * WK;
    static constexpr int STAGE = 3 * STEP * ENTRIES;  // pieces of 16 bytes
    static constexpr int BLOCKS = F::HALVES ? 1 : WK > 1 ? 2 : 3;  // on a multiprocessor at once: no more registers than that
    float sum[2][G][4];
    int t, g, warp_k, groups;
    __device__ __forceinline__ Tile() {
        g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp_k = threadIdx.x / 32 % WK;
#pragma unroll
        for (int i = 0; i < 2 * G * 4; i++) sum[i / (4 * G)][i / 4 % G][i % 4] = 0.0f;
    }
    // Where piece `i` of an entry's codes stands in a stage: eight neighbours in i or entry are in different banks.
    static __device__ __forceinline__ int place(int entry, int i) { return entry * 2 * STEP + (i ^ (entry & 7)); }

    static __device__ __forceinline__ void fetch(const Many &a, float4 *stage, const i32 *rows, i64 block) {
        for (int p = threadIdx.x; p < 2 * STEP * ENTRIES; p += THREADS) {
            const int entry = p / (2 * STEP), i = p % (2 * STEP);
            if (block + i / 2 < a.blocks)
                cp_async_16(stage + place(entry, i), a.codes + (rows[entry] * a.blocks + block) * 32 + 16 * i);
        }
        for (int p = threadIdx.x; p < STEP * ENTRIES; p += THREADS) {
            const int entry = p / STEP, b = p % STEP;
            if (block + b < a.blocks)
                cp_async_16(stage + (2 * STEP + b) * ENTRIES + entry, a.scales + rows[entry] * a.blocks + block + b);
        }
    }
    struct Weights {
        Codes codes[4];
        typename F::Record record;
        __device__ __forceinline__ void load(const Unit<F> &u, i64 block) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < 4; i++) codes[i] = u.codes(block, lane / 4 + 8 * i, lane % 4);
            record = u.record(block, lane);
        }
    };
    // Block number `k` of a stage, which is `block` of its record.
    __device__ __forceinline__ void add(const Weights &w, const float4 *stage, int k, int block) {
        const Scales mine = F::scales(w.record, block);
        constexpr int H = F::HALVES ? 2 : 1;
        float scale[4][H], bias[4][H];
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int h = 0; h < H; h++) {
                scale[i][h] = __shfl_sync(ALL_LANES, mine.scale[h], g + 8 * i);
                if (F::SCALED) scale[i][h] *= F::factor(w.codes[i]);
                if (F::BIAS) bias[i][h] = __shfl_sync(ALL_LANES, mine.bias[h], g + 8 * i);
            }
            a[i / 2][i % 2] = F::codes(w.codes[i], 0);
            a[i / 2][2 + i % 2] = F::codes(w.codes[i], 1);
        }
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < G; j++) {
            if (j >= groups) break;
            u32 b[4];
            if (j % 2 == 0) ldmatrix_x4(pair, stage + place(8 * j + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            b[0] = pair[j % 2 * 2], b[1] = pair[j % 2 * 2 + 1];
            const float4 *x = stage + (2 * STEP + k) * ENTRIES + 8 * j + 2 * t;
            const float4 x0 = x[0], x1 = x[1];
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int h = 0; h < H; h++) {
                    i32 d[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
                    const u32 part[4] = {h == 0 ? a[r][0] : 0, h == 0 ? a[r][1] : 0, h == 1 || H == 1 ? a[r][2] : 0,
                                         h == 1 || H == 1 ? a[r][3] : 0};
                    mma_s8(d, part, b);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float4 v = e % 2 ? x1 : x0;
                        const int row = 2 * r + e / 2;
                        float &s = sum[r][j][e];
                        s = fmaf(fmaf(__int_as_float(d[e]), v.x, v.y), scale[row][h], s);
                        if (F::BIAS) s = fmaf(bias[row][h], H == 1 ? v.z : h == 0 ? v.w : v.z - v.w, s);
                    }
                }
        }
    }
    u32 pair[4];  // fragments of two groups
    // The sums of the warps of a row, in the first of them; always in the same order.
    __device__ __forceinline__ void reduce(float *room) {
        const int lane = threadIdx.x % 32, warp_r = threadIdx.x / 32 / WK;
#pragma unroll
        for (int half = WK / 2; half > 0; half /= 2) {
            float *mine = room + (warp_r * half + warp_k % half) * 8 * G * 32 + lane;
            if (warp_k >= half && warp_k < 2 * half)
#pragma unroll
                for (int i = 0; i < 8 * G; i++) mine[32 * i] = sum[i / (4 * G)][i / 4 % G][i % 4];
            __syncthreads();
            if (warp_k < half)
#pragma unroll
                for (int i = 0; i < 8 * G; i++) sum[i / (4 * G)][i / 4 % G][i % 4] += mine[32 * i];
            __syncthreads();
        }
    }
};
template <class F, int G, int WR, int WK> __global__ void __launch_bounds__(32 * WR * WK, Tile<F, G, WR, WK>::BLOCKS) many(const __grid_constant__ Many a) {
    wait_for_earlier();
    using T = Tile<F, G, WR, WK>;
    DYNAMIC_SHARED(room, float4);  // two stages
    SHARED(rows, i32[T::ENTRIES]);
    SHARED(slots, i32[T::ENTRIES]);
    const int4 tile = a.tiles[blockIdx.y];
    if (tile.z == 0) return;
    const i64 number = (i64)blockIdx.x * WR + threadIdx.x / 32 / WK;
    for (int i = threadIdx.x; i < T::ENTRIES; i += T::THREADS) {
        const int entry = tile.y + min(i, tile.z - 1), slot = a.order ? a.order[entry] : entry;
        slots[i] = slot;
        rows[i] = (i32)row_of(slot, a.used, a.shared);
    }
    F::load_book();
    __syncthreads();
    T made;
    made.groups = (tile.z + 7) / 8;
    if (tile.x >= 0) {
        const bool real = number < a.units;
        const Unit<F> unit(a.w, tile.x * a.units + (real ? number : 0), a.blocks, a.row_bytes);
        const i64 end = real ? a.blocks : 0;
        typename T::Weights now, next;
        i64 block = made.warp_k;
        if (block < end) next.load(unit, block);
        T::fetch(a, room, rows, 0);
        cp_async_commit();
        for (i64 first = 0, s = 0; first < a.blocks; first += T::STEP, s ^= 1) {
            cp_async_wait<0>();
            __syncthreads();  // this stage is there, and nobody reads the one before
            T::fetch(a, room + (s ^ 1) * T::STAGE, rows, first + T::STEP);
            cp_async_commit();
            for (int k = made.warp_k; k < T::STEP && block < end; k += WK, block += WK) {
                now = next;
                if (block + WK < end) next.load(unit, block + WK);
                made.add(now, room + s * T::STAGE, k, (int)(block % F::SUPER));
            }
        }
        __syncthreads();
        made.reduce((float *)room);
    }
    if (made.warp_k > 0 || number >= a.units) return;
#pragma unroll
    for (int i = 0; i < 8 * G; i++) {
        const int r = i / (4 * G), j = i / 4 % G, e = i % 4, entry = 8 * j + 2 * made.t + e % 2;
        const i64 row = 32 * number + 16 * r + made.g + 8 * (e / 2);
        if (entry < tile.z && row < a.rows) a.out[slots[entry] * a.out_step + row] = made.sum[r][j][e];
    }
}

// --------------------------------------------------------------------------------------------------------- rows

// One block for each row: number `ids[i]` of a packed table, or all of them, becomes row i.
template <class Id> struct Unpack {
    const u8 *w;
    i64 blocks, row_bytes, rows, units, total, out_step;  // rows and units of a matrix, rows of all
    Axes axes;                                            // of the ids
    Walk<const Id> ids;
    float *out;
    Fault fault;
};
template <class F, class Id> __global__ void unpack(const __grid_constant__ Unpack<Id> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.ids.step};
    const i64 id = a.ids.at ? a.ids.at[places(a.axes, steps, blockIdx.x).at[0]] : blockIdx.x;
    if (id < 0 || id >= a.total) {
        if (threadIdx.x == 0) note_fault(a.fault, id);
        return;
    }
    const i64 within = id % a.rows;
    const Unit<F> unit(a.w, id / a.rows * a.units + within / 32, a.blocks, a.row_bytes);
    const int row = (int)(within % 32);
    if (F::BOOK) {
        F::load_book();
        __syncthreads();
    }
    for (i64 i = threadIdx.x; i < 4 * a.blocks; i += blockDim.x) {
        const i64 block = i / 4;
        const int t = (int)(i % 4);
        const Codes c = unit.codes(block, row, t);
        const Scales s = F::scaled(F::scales(unit.record(block, row), (int)(block % F::SUPER)), c);
        float *out = a.out + blockIdx.x * a.out_step + 32 * block + 4 * t;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 q = F::codes(c, h);
            const int part = F::HALVES ? h : 0;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float value = __fmul_rn(s.scale[part], (float)(i8)(q >> 8 * e));
                out[16 * h + e] = F::BIAS ? __fadd_rn(value, s.bias[part]) : value;
            }
        }
    }
}
