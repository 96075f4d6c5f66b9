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
    CellReader<Cell> row = a.x.cells<Cell>((int)(head / a.groups), (int)(head % a.groups)) + key * a.x.row;
    if (!real || key >= a.keys) row = nullptr;
    u16 *halves = a.halves + place * 2 * tile * columns;
    const int here = (int)(key % tile), size = (int)a.size;
    const float unit = columns <= 8 * lanes
                           ? split_row<half_bits, 2, 1>(row, a.x.column, a.dense, size, lanes, c, columns, here, halves, tile * columns, real)
                           : split_row<half_bits, 2, 3>(row, a.x.column, a.dense, size, lanes, c, columns, here, halves, tile * columns, real);
    if (real && c == 0) a.units[number] = unit;
}

// The row `number` of the result, and what its splits leave.
struct Left {
    int head, splits;
    const float *state, *sums;
    float *out;
    __device__ __forceinline__ Left(const Args &a, int number) : splits((int)a.splits) {
        const int heads = (int)(a.groups * a.shared), token = number / heads % (int)a.tokens;
        const i64 batch = number / heads / (int)a.tokens, first = (i64)number * splits;
        head = number % heads, state = a.state + 2 * first, sums = a.sums + first * a.width;
        out = a.out.at + batch * a.out.batch + (i64)token * a.out.row + head * a.out.head;
    }
};
// What the sums of a split are multiplied by, for the thread of that number, of which there are no fewer; what all of them
// are in the end.
__device__ __forceinline__ float weigh(const Args &a, const Left &left, float *grows, float *room) {
    const int mine = threadIdx.x;
    const float2 here = mine < left.splits ? *(const float2 *)(left.state + 2 * mine) : make_float2(LOWEST, 0.0f);
    const float top = block_max(here.x, room);
    grows[mine] = grown(here.x - top);
    return share_of(a, left.head, top, block_sum(grows[mine] * here.y, room));  // a barrier is inside
}

// A block for each row: of many rows there are enough of them.
__global__ void __launch_bounds__(THREADS) attention_combine(const __grid_constant__ Args a) {
    wait_for_earlier();
    SHARED(room, float[32]);
    SHARED(grows, float[THREADS]);
    const Left left(a, blockIdx.x);
    const float share = weigh(a, left, grows, room);
    for (i64 c = threadIdx.x; c < a.width; c += THREADS) {
        float x = 0.0f;
#pragma unroll 16
        for (int s = 0; s < left.splits; s++) x = fmaf(grows[s], left.sums[s * a.width + c], x);
        left.out[c] = x * share;
    }
}

// Blocks are few rows, and 32 columns of them.  Warps share the splits out, lanes have a column each.  Sums of splits are
// on their way while weights are added up, so that nobody waits for memory twice.
constexpr int AT_ONCE = 16;  // sums that a lane waits for together
__global__ void __launch_bounds__(THREADS) attention_combine_few(const __grid_constant__ Args a) {
    SHARED(room, float[32]);
    SHARED(grows, float[THREADS]);
    SHARED(parts, float[WARPS][32]);
    const Left left(a, blockIdx.x);
    const int splits = left.splits, width = (int)a.width, lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.y * 32 + lane;
    const float *sums = left.sums + min(c, width - 1);
    wait_for_earlier();
    float ahead[AT_ONCE];
    const auto ask = [&](int from) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) ahead[i] = sums[(i64)min(from + i * WARPS, splits - 1) * width];
    };
    ask(warp);
    const float share = weigh(a, left, grows, room);
    float x = 0.0f;
    for (int from = warp; from < splits; from += AT_ONCE * WARPS) {
        if (from > warp) ask(from);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (from + i * WARPS < splits) x = fmaf(grows[from + i * WARPS], ahead[i], x);
    }
    parts[warp][lane] = x;
    __syncthreads();
    if (warp > 0 || c >= width) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w][lane];
    left.out[c] = sum * share;
}
