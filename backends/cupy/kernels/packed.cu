// Products with packed weights, but for those that fill large tiles: see tiled.cu.  Activations are rounded to 8 bits in
// blocks of 32, products of codes are exact integers, and scales are applied in float32, so that the number of tokens changes
// no more than the order of a sum.
//
// Integer sums start at MAGIC_BITS: their bits, read as a float, are MAGIC + sum, exactly.  Scales d of activations have 21
// significant bits, so that MAGIC d is exact as well and one fma(MAGIC + sum, d, -MAGIC d) is d sum, rounded once.
constexpr i32 MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

struct Rounded {
    u32 codes;
    float4 scale;  // d, -MAGIC d, d times the sum of the 32 codes, and of the first 16
};
// A block of 32 in 8 lanes, 4 numbers each; infinities and NaN end in d.
__device__ __forceinline__ Rounded round_block(const float (&x)[4]) {
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) top = max(top, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (int by = 1; by < 8; by *= 2) top = max(top, __shfl_xor_sync(ALL_LANES, top, by));
    const float d = __uint_as_float(__float_as_uint(__uint_as_float(top) * (1.0f / 127.0f)) & ~7u);
    const float up = d < 1e-37f ? 18446744073709551616.0f : 1.0f;  // the inverse of less is no number
    const float inverse = d > 0.0f ? 1.0f / (d * up) : 0.0f;
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) codes |= ((u32)__float2int_rn(x[i] * up * inverse) & 0xff) << 8 * i;
    i32 half = dp4a(codes, 0x01010101, 0);
    half += __shfl_xor_sync(ALL_LANES, half, 1);
    half += __shfl_xor_sync(ALL_LANES, half, 2);
    const i32 other = __shfl_xor_sync(ALL_LANES, half, 4);
    return {codes, {d, -MAGIC * d, d * (half + other), d * (threadIdx.x % 8 < 4 ? half : other)}};
}
// Lane l brings columns 4 l ... of four blocks from `block` on; those past the last block are 0.
__device__ __forceinline__ Rounded round_four(const float *row, int block, int blocks) {
    const int lane = threadIdx.x % 32;
    float x[4] = {};
    if (block + lane / 8 < blocks)
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = row[32 * block + 4 * lane + i];
    return round_block(x);
}
struct Round {
    const float *x;
    i64 step, rows, blocks;
    u32 *codes;      // [rows][columns / 4]
    float4 *scales;  // [rows][blocks]
};
__global__ void __launch_bounds__(256) round_rows(const __grid_constant__ Round a) {
    const i64 chunks = (a.blocks + 3) / 4, i = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (i >= a.rows * chunks) return;  // a whole warp
    const i64 row = i / chunks, block = i % chunks * 4, mine = block + threadIdx.x % 32 / 8;
    const Rounded r = round_four(a.x + row * a.step, block, a.blocks);
    if (mine >= a.blocks) return;
    a.codes[(row * a.blocks + block) * 8 + threadIdx.x % 32] = r.codes;
    if (threadIdx.x % 8 == 0) a.scales[row * a.blocks + mine] = r.scale;
}

// ------------------------------------------------------------------------------------------------------ few tokens

struct Few {
    struct Product {
        const u8 *w;
        float *out;
        i64 first, units, rows, out_step;  // the first of its blocks
    } product[MOST_PRODUCTS];
    i64 products, unit;  // a unit has two products, and makes one result of them
    const float *x;
    i64 blocks, row_bytes, tokens, x_step;  // `tokens` rows of x for each entry
    i64 used, shared;
    Choice choice;
};
// A thread has a row of 32, the warps of a block share its columns: each takes chunks of 4 blocks, rounds what it needs of
// the N rows of x itself, and the sums of warps are added in order.  Of a gated unit half of the warps have the gate, half
// what it gates.
//
// A warp asks for all codes of a chunk (4-bit: 4 x 16 bytes a lane, 2 KiB) before it rounds; with 32 warps on a
// multiprocessor 64 KiB are in flight, of some 25 KiB that hide 700 ns at 4.8 TB/s (8-bit: 4 KiB, with 16 warps, which have
// twice the registers).  A block of 18 bytes (4 bits, a scale)
// costs a thread about 12 instructions of unpacking, 8 dp4a, 2 + 1 broadcast loads, 4 for the scale and 4 for the sum of
// each token, and 11 for its part of the rounding: 11 bytes a warp's instruction at one token, where 5.2 keep up with memory.
template <class F, int N> __global__ void __launch_bounds__(512, N == 1 && F::LOW < 8 ? 2 : 1) few(const __grid_constant__ Few a) {
    SHARED(codes, uint4[16][N][4][2]);
    SHARED(scales, float4[16][N][4]);
    SHARED(sums, float[16][N][32]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = a.unit ? blockDim.x / 64 : blockDim.x / 32;
    const i64 entry = blockIdx.y, matrix = a.choice.matrix_of(entry);
    if (blockIdx.x == 0 && threadIdx.x == 0) a.choice.check(entry);
    const float *x = a.x + row_of(entry, a.used, a.shared) * a.tokens * a.x_step;
    const int end = matrix < 0 ? 0 : (int)a.blocks;  // one of elsewhere adds nothing
    const bool second = warp >= warps;
    int which = second;
    if (!a.unit)
        while (which + 1 < a.products && blockIdx.x >= a.product[which + 1].first) which++;
    const Few::Product &product = a.product[which];
    const i64 number = max(matrix, (i64)0) * product.units + blockIdx.x - product.first;
    const Unit<F> unit(product.w, number, a.blocks, a.row_bytes);
    float sum[N] = {};
    for (int block = 4 * (second ? warp - warps : warp); block < end; block += 4 * warps) {
        constexpr int RECORDS = F::SUPER == 1 ? 4 : 1;
        RowCodes<F> w[4];
        typename F::Record records[RECORDS];
#pragma unroll
        for (int b = 0; b < 4; b++)
            if (block + b < end) {
                w[b].load(unit, block + b, lane);
                if (b < RECORDS) records[b] = unit.record(block + b, lane);
            }
        __syncwarp();  // all have done with the chunk before
#pragma unroll
        for (int n = 0; n < N; n++) {
            const Rounded r = round_four(N == 1 ? x : x + min((i64)n, a.tokens - 1) * a.x_step, block, end);
            ((u32 *)codes[warp][n])[lane] = r.codes;
            if (lane % 8 == 0) scales[warp][n][lane / 8] = r.scale;
        }
        __syncwarp();
#pragma unroll
        for (int b = 0; b < 4; b++) {
            if (block + b >= end) break;
            const Scales s = F::scales(records[b % RECORDS], (int)((block + b) % F::SUPER));
            u32 q[2][4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const Codes c = w[b].at(t);
                q[0][t] = F::codes(c, 0), q[1][t] = F::codes(c, 1);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                i32 dot[2] = {MAGIC_BITS, MAGIC_BITS};
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint4 v = codes[warp][n][b][h];
                    i32 &d = dot[F::HALVES ? h : 0];
                    d = dp4a(q[h][3], v.w, dp4a(q[h][2], v.z, dp4a(q[h][1], v.y, dp4a(q[h][0], v.x, d))));
                }
                const float4 v = scales[warp][n][b];
                sum[n] = fmaf(fmaf(__int_as_float(dot[0]), v.x, v.y), s.scale[0], sum[n]);
                if (F::HALVES) sum[n] = fmaf(fmaf(__int_as_float(dot[1]), v.x, v.y), s.scale[1], sum[n]);
                if (F::BIAS) sum[n] = fmaf(s.bias[0], F::HALVES ? v.w : v.z, sum[n]);
                if (F::BIAS && F::HALVES) sum[n] = fmaf(s.bias[1], v.z - v.w, sum[n]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) sums[warp][n][lane] = sum[n];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * N; i += blockDim.x) {
        const Few::Product &made = a.product[a.unit ? 0 : which];
        const i64 row = 32 * (blockIdx.x - made.first) + i % 32;
        if (row >= made.rows || i / 32 >= a.tokens) continue;
        float total = 0.0f, up = 0.0f;
        for (int w = 0; w < warps; w++) total += sums[w][i / 32][i % 32];
        if (a.unit) {
            for (int w = warps; w < 2 * warps; w++) up += sums[w][i / 32][i % 32];
            total = gated(a.unit, total, up);
        }
        made.out[(entry * a.tokens + i / 32) * made.out_step + row] = total;
    }
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
    static constexpr int STEP = WK > 4 ? WK : 4, ENTRIES = 8 * G, THREADS = 32 * WR * WK;
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
    const i64 *const steps[] = {a.ids.step};
    const i64 id = a.ids.at ? a.ids.at[places(a.axes, steps, blockIdx.x).at[0]] : blockIdx.x;
    if (id < 0 || id >= a.total) {
        if (threadIdx.x == 0) note_fault(a.fault, id);
        return;
    }
    const i64 within = id % a.rows;
    const Unit<F> unit(a.w, id / a.rows * a.units + within / 32, a.blocks, a.row_bytes);
    const int row = (int)(within % 32);
    for (i64 i = threadIdx.x; i < 4 * a.blocks; i += blockDim.x) {
        const i64 block = i / 4;
        const int t = (int)(i % 4);
        const Codes c = unit.codes(block, row, t);
        const Scales s = F::scales(unit.record(block, row), (int)(block % F::SUPER));
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
