// Many rows: tiles of them and of keys meet on tensor cores, as halves.

constexpr int ROWS = 64;  // of a tile

enum { HIDDEN, MIXED, OPEN };  // no key of a tile is seen by any row; all are by all, and nothing is added

struct Tiles {
    Args a;
    u16 *k, *v;               // of each batch, key head and tile of keys: high halves, then low ones
    float *k_units, *v_units; // of each batch, key head and key: what its halves are multiples of
    i32 *seen;                // of each batch, key head, tile of rows and tile of keys; null if all is
    i64 seen_batch, seen_head, tiles, tile, dense;
};

// Blocks are tiles of keys, tiles of rows, and batches times key heads as far as masks differ.
__global__ void __launch_bounds__(THREADS) attention_seen(const __grid_constant__ Tiles x) {
    const Args &a = x.a;
    const i64 groups = x.seen_head ? a.groups : 1, batch = blockIdx.z / groups, group = blockIdx.z % groups;
    const i64 last = a.tokens * a.shared - 1, heads = x.seen_head ? a.shared : 1;
    const i64 first = blockIdx.y * (i64)ROWS / a.shared, end = min(blockIdx.y * (i64)ROWS + ROWS - 1, last) / a.shared;
    bool hidden = true, open = true;
    for (i64 i = threadIdx.x; i < (end - first + 1) * heads * x.tile; i += THREADS) {
        const i64 token = first + i / x.tile / heads, head = group * a.shared + i / x.tile % heads;
        const Row row = {token, head, 0, true};
        const float bias = bias_of(a, mask_of(a, batch, row), slope_of(a, row), blockIdx.x * x.tile + i % x.tile);
        hidden &= bias == -INFINITY, open &= bias == 0.0f;
    }
    SHARED(found, int[WARPS]);
    hidden = __all_sync(ALL_LANES, hidden), open = __all_sync(ALL_LANES, open);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = hidden | open << 1;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int all = 3;
    for (int w = 0; w < WARPS; w++) all &= found[w];
    const i64 at = batch * x.seen_batch + group * x.seen_head + blockIdx.y * x.tiles + blockIdx.x;
    x.seen[at] = all & 1 ? HIDDEN : all & 2 ? OPEN : MIXED;
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
#ifdef HOCKET_EMULATED
    return (u32)float_to_half(low) | (u32)float_to_half(high) << 16;
#else
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}
// Two floats as halves, and as halves what those lack.
__device__ __forceinline__ void split(float x, float y, u32 &high, u32 &low) {
    high = pack_half(x, y);
    low = pack_half(x - half_to_float((u16)high), y - half_to_float((u16)(high >> 16)));
}
// Where eight columns of a row lie in a tile of `columns`: rows that are read together lie in different banks.
__device__ __forceinline__ int chunk(int row, int c, int columns) { return row * columns + 8 * (c ^ (row & 7)); }

// Lane `c` of the `lanes` that share a row turns its columns 8 c to 8 c + 7 into halves, multiples of a power of two for
// the row, which all of them get.  A row that is null is zeros.
__device__ __forceinline__ float split_row(const float *row, i64 step, bool dense, i64 size, int lanes, int c, u16 *high, u16 *low, bool writes) {
    float x[8], most = 0.0f;
    if (dense && row && 8 * c < size) {
        const float4 one = *(const float4 *)(row + 8 * c), two = *(const float4 *)(row + 8 * c + 4);
        x[0] = one.x, x[1] = one.y, x[2] = one.z, x[3] = one.w, x[4] = two.x, x[5] = two.y, x[6] = two.z, x[7] = two.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = row && 8 * c + i < size ? row[(8 * c + i) * step] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(x[i]));
    for (int by = lanes / 2; by > 0; by >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, by));
    const int exponent = min(max((int)(__float_as_uint(most) >> 23), 15), 254) - 14;  // the largest becomes 2^14 or more
    const float up = __uint_as_float((u32)(254 - exponent) << 23), unit = __uint_as_float((u32)exponent << 23);
    u32 h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; i++) split(x[2 * i] * up, x[2 * i + 1] * up, h[i], l[i]);
    if (writes) {
        *(uint4 *)high = make_uint4(h[0], h[1], h[2], h[3]);
        *(uint4 *)low = make_uint4(l[0], l[1], l[2], l[3]);
    }
    return row ? unit : 0.0f;
}

// The keys (or values) as halves, 32 / lanes of them a warp; those past the last are zeros.
struct Split {
    View x;
    u16 *halves;
    float *units;
    i64 keys, groups, size, columns, tiles, tile, count, lanes, dense;
};
__global__ void __launch_bounds__(THREADS) attention_split(const __grid_constant__ Split a) {
    const int lane = threadIdx.x % 32, lanes = (int)a.lanes, c = lane % lanes, columns = (int)a.columns, tile = (int)a.tile;
    const i64 number = (i64)blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes, all = a.tiles * tile, key = number % all;
    const i64 head = number / all, place = number / tile;
    const bool real = number < a.count;
    const float *row = a.x.at + head / a.groups * a.x.batch + head % a.groups * a.x.head + key * a.x.row;
    u16 *halves = a.halves + place * 2 * tile * columns + chunk((int)(key % tile), c, columns);
    const bool there = real && key < a.keys;
    const float unit = split_row(there ? row : nullptr, a.x.column, a.dense, a.size, lanes, c, halves, halves + tile * columns, real && 8 * c < columns);
    if (real && c == 0) a.units[number] = unit;
}

// Sum of three products of a tile of A, high and low, with two tiles of B beside each other.
__device__ __forceinline__ void multiply(float *d, float *e, const u32 *high, const u32 *low, const u32 *h, const u32 *l) {
    mma_f16(d, high, l), mma_f16(e, high, l + 2);
    mma_f16(d, low, h), mma_f16(e, low, h + 2);
    mma_f16(d, high, h), mma_f16(e, high, h + 2);
}
__device__ __forceinline__ void copy_tile(u16 *to, const u16 *from, int halves) {
    for (int i = 8 * threadIdx.x; i < halves; i += 8 * THREADS) cp_async_16(to + i, from + i);
}
// The first tile from `i`, in steps of `step`, that is not hidden; `tiles` or more if there is none.
__device__ __forceinline__ i64 next_tile(const i32 *seen, i64 i, i64 step, i64 tiles) {
    if (seen == nullptr) return i;
    for (; i < tiles; i += 32 * step) {
        const i64 mine = i + threadIdx.x % 32 * step;
        const u32 some = __ballot_sync(ALL_LANES, mine < tiles && seen[mine] != HIDDEN);
        if (some) return i + (__ffs((int)some) - 1) * step;
    }
    return tiles;
}

// A block is a tile of rows, each warp has 16 of them; blocks are tiles (the last rows first: they see most keys), key
// heads times batches, splits.  `held`: queries stay in registers, else in shared memory.
template <int D, int E, int KEYS, bool held>
__global__ void __launch_bounds__(THREADS) attend_tiles(const __grid_constant__ Tiles x) {
    const Args &a = x.a;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const i64 rows = gridDim.x - 1 - blockIdx.x, group = blockIdx.y % a.groups, batch = blockIdx.y / a.groups, split_number = blockIdx.z;
    DYNAMIC_SHARED(room, u16);
    u16 *k = room, *v = k + 2 * KEYS * D, *q = held ? room : v + 2 * KEYS * E;
    const i64 place = (i64)blockIdx.y * x.tiles;
    const u16 *keys = x.k + place * 2 * KEYS * D, *values = x.v + place * 2 * KEYS * E;
    const float *k_units = x.k_units + place * KEYS, *v_units = x.v_units + place * KEYS;
    const i32 *seen = x.seen ? x.seen + batch * x.seen_batch + group * x.seen_head + rows * x.tiles : nullptr;

    // Rows of this warp as halves; unit and mask of the two rows that this lane has.
    constexpr int LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32;
    float unit[2] = {0.0f, 0.0f};
    for (int i = 0; i < 16; i += 32 / LANES) {
        const int mine = 16 * warp + i + lane / LANES, c = lane % LANES;
        const Row row = row_of(a, batch, group, rows * ROWS + mine);
        const float *from = a.q.at + batch * a.q.batch + row.token * a.q.row + row.head * a.q.head;
        u16 *to = q + chunk(mine, c, D);
        const float u = split_row(from, a.q.column, x.dense, a.size, LANES, c, to, to + ROWS * D, 8 * c < D);
        for (int r = 0; r < 2; r++) {
            const int at = g + 8 * r - i;
            const float got = __shfl_sync(ALL_LANES, u, (at * LANES) & 31);
            if (at >= 0 && at < 32 / LANES) unit[r] = got * (float)a.scale;
        }
    }
    __syncwarp();
    u32 q_high[held ? D / 16 : 1][4], q_low[held ? D / 16 : 1][4];
    const int q_row = 16 * warp + lane % 16;
    if (held) {
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            ldmatrix_x4(q_high[d], q + chunk(q_row, 2 * d + lane / 16, D));
            ldmatrix_x4(q_low[d], q + ROWS * D + chunk(q_row, 2 * d + lane / 16, D));
        }
        __syncthreads();
    }
    const Row row[2] = {row_of(a, batch, group, rows * ROWS + 16 * warp + g), row_of(a, batch, group, rows * ROWS + 16 * warp + g + 8)};
    const float *mask[2] = {mask_of(a, batch, row[0]), mask_of(a, batch, row[1])};
    const float slope[2] = {slope_of(a, row[0]), slope_of(a, row[1])};

    float acc[E / 8][4] = {}, top[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f}, run = 0x1p-100f;  // acc is in units of run / 2^14
    i64 tile = next_tile(seen, split_number, a.splits, x.tiles);
    if (tile < x.tiles) copy_tile(k, keys + tile * 2 * KEYS * D, 2 * KEYS * D);
    cp_async_commit();
    while (tile < x.tiles) {
        copy_tile(v, values + tile * 2 * KEYS * E, 2 * KEYS * E);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 high[4], low[4];
            if (!held) {
                ldmatrix_x4(high, q + chunk(q_row, 2 * d + lane / 16, D));
                ldmatrix_x4(low, q + ROWS * D + chunk(q_row, 2 * d + lane / 16, D));
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 h[4], l[4];
                const int at = chunk(16 * n + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2, D);
                ldmatrix_x4(h, k + at);
                ldmatrix_x4(l, k + KEYS * D + at);
                multiply(s[2 * n], s[2 * n + 1], held ? q_high[d] : high, held ? q_low[d] : low, h, l);
            }
        }
        __syncthreads();
        const i64 first = tile * KEYS, next = next_tile(seen, tile + a.splits, a.splits, x.tiles);
        if (next < x.tiles) copy_tile(k, keys + next * 2 * KEYS * D, 2 * KEYS * D);
        cp_async_commit();

        const bool open = seen ? seen[tile] == OPEN : first + KEYS <= a.keys;
        float high[2] = {top[0], top[1]}, most = run;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const i64 key = first + 8 * n + 2 * t + i % 2;
                float score = capped(a, s[n][i] * unit[i / 2] * k_units[key]);
                if (!open) score += bias_of(a, mask[i / 2], slope[i / 2], key);
                s[n][i] = score;
                high[i / 2] = fmaxf(high[i / 2], score);
                most = fmaxf(most, v_units[key]);
            }
#pragma unroll
        for (int by = 1; by < 4; by <<= 1) {
            high[0] = fmaxf(high[0], __shfl_xor_sync(ALL_LANES, high[0], by));
            high[1] = fmaxf(high[1], __shfl_xor_sync(ALL_LANES, high[1], by));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, by));
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float fade = grown(top[r] - high[r]), turned = fade * (run / most);
            top[r] = high[r], sum[r] *= fade;
#pragma unroll
            for (int e = 0; e < E / 8; e++) acc[e][2 * r] *= turned, acc[e][2 * r + 1] *= turned;
        }
        run = most;
        const float down = 16384.0f / run;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float p = grown(s[n][i] - top[i / 2]);
                sum[i / 2] += p;
                s[n][i] = p * (v_units[first + 8 * n + 2 * t + i % 2] * down);
            }
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 p_high[4], p_low[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                split(s[2 * n + i / 2][2 * (i % 2)], s[2 * n + i / 2][2 * (i % 2) + 1], p_high[i], p_low[i]);
#pragma unroll
            for (int e = 0; e < E / 16; e++) {
                u32 h[4], l[4];
                const int at = chunk(16 * n + lane % 16, 2 * e + lane / 16, E);
                ldmatrix_x4_trans(h, v + at);
                ldmatrix_x4_trans(l, v + KEYS * E + at);
                multiply(acc[2 * e], acc[2 * e + 1], p_high, p_low, h, l);
            }
        }
        __syncthreads();
        tile = next;
    }
    cp_async_wait<0>();

#pragma unroll
    for (int r = 0; r < 2; r++) {
        for (int by = 1; by < 4; by <<= 1) sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], by);
        const float share = (a.splits > 1 ? 1.0f : share_of(a, row[r].head, top[r], sum[r])) * (run / 16384.0f);
        float *target = target_of(a, batch, row[r], split_number);
        if (!row[r].real) continue;
#pragma unroll
        for (int e = 0; e < E / 8; e++)
            for (int i = 0; i < 2; i++)
                if (8 * e + 2 * t + i < a.width) target[8 * e + 2 * t + i] = acc[e][2 * r + i] * share;
        if (a.splits > 1 && t == 0) keep_state(a, row[r], split_number, top[r], sum[r]);
    }
}
