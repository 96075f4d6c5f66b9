// Orders of the entries of rows.  Runs are sorted in shared memory, and runs of rows that do not fit are sorted again or
// merged; of every run only as many items are kept as are asked for.

constexpr int EACH = 8;  // items of a thread
// Where an item lies in shared memory: the 16 that half a warp touches at once lie in different banks.
__device__ __forceinline__ int place_of(int i) { return i ^ (i >> 4 & 7) ^ (i >> 3 & 8); }

// One stage of a bitonic network of 2^bits items: runs of 2^stage become sorted, every second one downwards.  A thread
// takes the eight items whose numbers differ in three bits through up to three steps at a time.  `far`: items that a
// warp needs first may have been written by another.
__device__ __forceinline__ void sort_stage(u64 *held, int bits, int stage, bool &far) {
    const int thread = threadIdx.x, threads = 1 << (bits - 3);
    for (int high = stage - 1; high >= 0; high -= 3) {
        const int low = max(high - 2, 0);
        const bool was_far = far;
        far = low > 5;  // otherwise a warp stays among its own 256 items
        if (far || was_far) __syncthreads();
        else __syncwarp();
        if (thread >= threads) continue;
        const int first = (thread >> low << (low + 3)) | (thread & ((1 << low) - 1));
        u64 x[EACH];
#pragma unroll
        for (int c = 0; c < EACH; c++) x[c] = held[place_of(first | c << low)];
#pragma unroll
        for (int by = 4; by > 0; by >>= 1) {
            if (by << low > 1 << high) continue;
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                if (c & by) continue;
                const bool downwards = (first | c << low) >> stage & 1;
                const u64 one = x[c], other = x[c | by];
                const bool exchange = (one > other) != downwards;
                x[c] = exchange ? other : one, x[c | by] = exchange ? one : other;
            }
        }
#pragma unroll
        for (int c = 0; c < EACH; c++) held[place_of(first | c << low)] = x[c];
    }
}
// The first `count` items, from the one numbered `at` on, as items or, where `out` is not null, as numbers of entries.
__device__ __forceinline__ void write_items(const u64 *held, i64 count, i64 at, u64 *sorted, i32 *out) {
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const u64 item = held[place_of(i)];
        if (out) out[at + i] = (i32)(u32)item;
        else sorted[at + i] = item;
    }
}

// Of each run of `length` of the `columns` of a row, the first `kept` in order.  Runs hold up to 2^bits entries of x or,
// where that is null, items.
struct Sort {
    i64 columns, runs, length, bits, kept, descending;
    const float *x;
    const u64 *items;
    u64 *sorted;
    i32 *out;
};
__global__ void __launch_bounds__(512) sort_runs(const __grid_constant__ Sort a) {
    wait_for_earlier();
    DYNAMIC_SHARED(held, u64);
    const i64 row = blockIdx.x / a.runs, first = blockIdx.x % a.runs * a.length, from = row * a.columns + first;
    const int there = (int)min(a.length, a.columns - first), bits = (int)a.bits;
    for (int i = threadIdx.x; i < 1 << bits; i += blockDim.x) {
        u64 item = LAST;
        if (i < there) item = a.x ? item_of(a.x[from + i], first + i, a.descending != 0) : a.items[from + i];
        held[place_of(i)] = item;
    }
    bool far = true;
    for (int stage = 1; stage <= bits; stage++) sort_stage(held, bits, stage, far);
    write_items(held, a.kept, blockIdx.x * a.kept, a.sorted, a.out);
}

// How many of the first `count` items of two merged runs come from the first run; all lanes of a warp look together.
__device__ __forceinline__ i64 share_of(const u64 *one, i64 ones, const u64 *other, i64 others, i64 count) {
    const int lane = threadIdx.x % 32;
    i64 low = max((i64)0, count - others), high = min(count, ones);
    while (low < high) {
        const i64 step = (high - low + 31) / 32, probe = low + (lane + 1) * step - 1;
        const bool before = probe < high && one[probe] < other[count - 1 - probe];
        const int sure = __popc(__ballot_sync(ALL_LANES, before));
        low += sure * step;
        high = min(high, low + step - 1);
    }
    return low;
}
// Of every two neighbours among the `runs` of a row, of `length` items each, the first `kept` in order; a block makes a
// tile of them.  The last run may be alone.
constexpr int TILE_BITS = 11, TILE = 1 << TILE_BITS;
struct Merge {
    i64 runs, length, kept, tiles;
    const u64 *items;
    u64 *sorted;
    i32 *out;
};
__global__ void __launch_bounds__(TILE / EACH) merge_runs(const __grid_constant__ Merge a) {
    wait_for_earlier();
    SHARED(held, u64[TILE]);
    SHARED(shares, i64[2]);
    const i64 pairs = (a.runs + 1) / 2, number = blockIdx.x / a.tiles, begin = blockIdx.x % a.tiles * TILE;
    const i64 run = number % pairs * 2, others = run + 1 < a.runs ? a.length : 0, all = a.length + others;
    const u64 *one = a.items + (number / pairs * a.runs + run) * a.length, *other = one + a.length;
    const i64 from = min(begin, all), to = min(begin + TILE, all);
    const int warp = threadIdx.x / 32;
    if (warp < 2) {
        const i64 share = share_of(one, a.length, other, others, warp ? to : from);
        if (threadIdx.x % 32 == 0) shares[warp] = share;
    }
    __syncthreads();
    const i64 ones = shares[1] - shares[0], rest = to - from - ones;
    one += shares[0], other += from - shares[0];
    for (int i = threadIdx.x; i < TILE; i += blockDim.x)  // upwards, then downwards
        held[place_of(i)] = i < ones ? one[i] : TILE - 1 - i < rest ? other[TILE - 1 - i] : LAST;
    bool far = true;
    sort_stage(held, TILE_BITS, TILE_BITS, far);
    write_items(held, min((i64)TILE, a.kept - begin), number * a.kept + begin, a.sorted, a.out);
}
