// Before tiles: which of them are seen, keys and values as halves.  After splits: their sums.

// Blocks are tiles of keys, tiles of rows, and batches times key heads as far as masks differ.
__global__ void __launch_bounds__(THREADS) attention_seen(const __grid_constant__ Tiles x) {
    wait_for_earlier();
    const Args &a = x.a;
    const int groups = x.seen_head ? (int)a.groups : 1, batch = blockIdx.z / groups, group = blockIdx.z % groups, tile = (int)x.tile;
    const int shared = (int)a.shared, heads = x.seen_head ? shared : 1, count = (int)a.tokens * shared;
    const int rows = (int)x.rows, begin = blockIdx.y * rows, first = begin / shared, end = min(begin + rows, count) - 1;
    bool hidden = true, open = true;
    for (int i = threadIdx.x; i < (end / shared - first + 1) * heads * tile; i += THREADS) {
        const Row row = {first + i / tile / heads, group * shared + i / tile % heads, 0, true};
        const float bias = bias_at(a, bias_of(a, batch, row), blockIdx.x * tile + i % tile);
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

// The keys (or values) as halves, 32 / lanes of them a warp; those past the last are zeros.
struct Split {
    View x;
    u16 *halves;
    float *units;
    i64 keys, groups, size, columns, tiles, tile, count, lanes, dense;
};
template <class Cell> __global__ void __launch_bounds__(THREADS) attention_split(const __grid_constant__ Split a) {
    wait_for_earlier();
    const int lane = threadIdx.x % 32, lanes = (int)a.lanes, c = lane % lanes, columns = (int)a.columns, tile = (int)a.tile;
    const i64 number = (i64)blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes, all = a.tiles * tile, key = number % all;
    const i64 head = number / all, place = number / tile;
    const bool real = number < a.count;
    const Cell *row = a.x.cells<Cell>((int)(head / a.groups), (int)(head % a.groups)) + key * a.x.row;
    if (!real || key >= a.keys) row = nullptr;
    u16 *halves = a.halves + place * 2 * tile * columns;
    const int here = (int)(key % tile), size = (int)a.size;
    const float unit = columns <= 8 * lanes
                           ? split_row<half_bits, 2, 1>(row, a.x.column, a.dense, size, lanes, c, columns, here, halves, tile * columns, real)
                           : split_row<half_bits, 2, 3>(row, a.x.column, a.dense, size, lanes, c, columns, here, halves, tile * columns, real);
    if (real && c == 0) a.units[number] = unit;
}

// A block for each row of the result, a thread for each split: there are fewer than threads.  Loads do not wait for one
// another, as each takes as long as the sum of a row.
__global__ void __launch_bounds__(THREADS) attention_combine(const __grid_constant__ Args a) {
    wait_for_earlier();
    SHARED(room, float[32]);
    SHARED(grows, float[THREADS]);
    const i64 heads = a.groups * a.shared, number = blockIdx.x, token = number / heads % a.tokens;
    const int head = (int)(number % heads), splits = (int)a.splits, mine = threadIdx.x;
    const i64 batch = number / heads / a.tokens;
    const float *state = a.state + 2 * number * splits, *sums = a.sums + number * splits * a.width;
    const float2 here = mine < splits ? *(const float2 *)(state + 2 * mine) : make_float2(LOWEST, 0.0f);
    const float top = block_max(here.x, room);
    grows[mine] = grown(here.x - top);
    const float share = share_of(a, head, top, block_sum(grows[mine] * here.y, room));  // a barrier is inside
    float *out = a.out.at + batch * a.out.batch + token * a.out.row + head * a.out.head;
    for (i64 c = threadIdx.x; c < a.width; c += THREADS) {
        float x = 0.0f;
#pragma unroll 16
        for (int s = 0; s < splits; s++) x = fmaf(grows[s], sums[s * a.width + c], x);
        out[c] = x * share;
    }
}
