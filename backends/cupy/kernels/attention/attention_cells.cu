// Few rows over keys and values that are kept in 16 bits: tensor cores multiply them as they come from memory, since few
// rows meet each of them.  Queries and weights are sums of cells, as near as float32.

template <class Cell> struct Cells {
    Args a;
    i64 dense;  // queries come in eights
    // Of splits that are neighbours, so many make a bunch; of each bunch of a row: values added up, highest score and sum of
    // weights.  Of each row group, key head and batch a number for every bunch, and one more; null if another launch adds up.
    i64 bunch;  // if it is 1, sums of bunches are those of splits
    float *sums, *state;
    u32 *numbers;
    typename Heads<Cell>::Words heads;
};
constexpr int PARTS_AT_ONCE = 12;                    // of a bunch, and bunches; all of them are on their way at once
constexpr int OWN = 16;                           // rows of a block, and keys that a warp takes at a time
constexpr int BLOCK = 8 * OWN + 4;                // floats of sums of 8 columns; those that threads read lie in different banks
constexpr int UP = 14;                            // weights are so many times doubled, that what they lack is no denormal half
constexpr float DOWN = 1.0f / (float)(1 << UP);

// Column i of two rows beside each other.
__device__ __forceinline__ u32 column(const uint4 &one, const uint4 &two, int i) {
    const u32 x[4] = {one.x, one.y, one.z, one.w}, y[4] = {two.x, two.y, two.z, two.w};
    return i % 2 ? x[i / 2] >> 16 | (y[i / 2] & 0xffff0000u) : (x[i / 2] & 0xffffu) | y[i / 2] << 16;
}

// Adds up parts of the rows of a block, in order: `count` of the `of_row` that each row has, from `first` on.  `put` gets the
// number of a row, a column, the sums of four, the highest score and the sum of weights.
template <class Put>
__device__ __forceinline__ void add_parts(const Args &a, int batch, int group, int first_row, const float *sums, const float *state, int of_row, int first, int count, Put put) {
    const int fours = (int)a.width / 4, rows = min(OWN, (int)(a.tokens * a.shared) - first_row);
    for (int i = threadIdx.x; i < rows * fours; i += THREADS) {
        const int r = i / fours, c = 4 * (i - r * fours);
        const Row row = row_of(a, batch, group, first_row + r);
        const i64 begin = row.number * of_row + first;
        float2 parts[PARTS_AT_ONCE];
        float4 values[PARTS_AT_ONCE];
#pragma unroll
        for (int p = 0; p < PARTS_AT_ONCE; p++) {
            const i64 at = begin + min(p, count - 1);
            parts[p] = *(const float2 *)(state + 2 * at), values[p] = *(const float4 *)(sums + at * a.width + c);
        }
        float top = LOWEST, total = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS_AT_ONCE; p++) top = fmaxf(top, parts[p].x);
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int p = 0; p < PARTS_AT_ONCE; p++) {
            if (p >= count) break;
            const float by = grown(parts[p].x - top);
            total = fmaf(by, parts[p].y, total);
            y.x = fmaf(by, values[p].x, y.x), y.y = fmaf(by, values[p].y, y.y);
            y.z = fmaf(by, values[p].z, y.z), y.w = fmaf(by, values[p].w, y.w);
        }
        put(row, c, y, top, total);
    }
}
// The blocks of a row group and key head share its keys out, so that one of them has to add up what they leave: the last of
// each bunch its splits, the last of all bunches these.
template <class Cell>
__device__ __forceinline__ void add_splits(const Cells<Cell> &x, int batch, int group, int first_row, u32 &number) {
    const Args &a = x.a;
    const int bunches = ((int)a.splits + (int)x.bunch - 1) / (int)x.bunch, own = blockIdx.x / (int)x.bunch;
    const int first = own * (int)x.bunch, count = min((int)x.bunch, (int)a.splits - first);
    u32 *numbers = x.numbers + ((i64)batch * gridDim.y + blockIdx.y) * (bunches + 1);
    if (x.bunch > 1) {
        if (!comes_last(numbers + own, count, number)) return;
        add_parts(a, batch, group, first_row, a.sums, a.state, (int)a.splits, first, count, [&](const Row &row, int c, float4 y, float top, float total) {
            const i64 at = row.number * bunches + own;
            *(float4 *)(x.sums + at * a.width + c) = y;
            if (c == 0) *(float2 *)(x.state + 2 * at) = make_float2(top, total);
        });
    }
    if (!comes_last(numbers + bunches, bunches, number)) return;
    add_parts(a, batch, group, first_row, x.sums, x.state, bunches, 0, bunches, [&](const Row &row, int c, float4 y, float top, float total) {
        const float share = share_of(a, row.head, top, total);
        float *target = a.out.at + batch * a.out.batch + row.token * a.out.row + row.head * a.out.head;
        *(float4 *)(target + c) = make_float4(y.x * share, y.y * share, y.z * share, y.w * share);
    });
}

// Blocks are splits; row groups, key heads; batches.  Lanes have keys g, of which they have columns 8 t of each 32, in the
// order in which they have those of queries, and values 2 t, of which they have columns 8 g of each 64: one load brings
// eight numbers.
template <class Cell, int D, int E, bool PLACES = false>
__global__ void __launch_bounds__(THREADS, 2) attend_cells(const __grid_constant__ Cells<Cell> x) {
    static_assert(PLACES == Heads<Cell>::PLACES, "its heads are made elsewhere");
    constexpr int TERMS = Pair<Cell>::TERMS, FRAGMENTS = D / 16;
    const Args &a = x.a;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int count = (int)(a.tokens * a.shared), row_groups = (count + OWN - 1) / OWN, first_row = blockIdx.y % row_groups * OWN;
    const int group = blockIdx.y / row_groups, batch = blockIdx.z, split_number = blockIdx.x;
    const int size = (int)a.size, width = (int)a.width, key_count = (int)a.keys;
    const Cell *keys = a.k.cells<Cell>(batch, group), *values = a.v.cells<Cell>(batch, group);
    // Keys and values are asked for before they are loaded, so that loads find them in the second cache: two lanes a key.
    const auto ask = [&](int first) {
        const int key = min(first + lane / 2, key_count - 1), half = lane % 2 * (LINE / (int)sizeof(Cell));
#pragma unroll 1
        for (int c = half; c < size; c += 2 * LINE / (int)sizeof(Cell)) prefetch(keys + key * a.k.row + c);
#pragma unroll 1
        for (int c = half; c < width; c += 2 * LINE / (int)sizeof(Cell)) prefetch(values + key * a.v.row + c);
    };
    const int step = OWN * WARPS * (int)a.splits;
    int first = OWN * (WARPS * split_number + warp);
    ask(first);
    wait_for_earlier();
    const float cap = (float)a.cap * LOG2_E;
    DYNAMIC_SHARED(room, float);
    SHARED(units, float[OWN]);
    SHARED(states, float2[WARPS][OWN]);
    uint4 *queries = (uint4 *)room;
    u16 *rows = (u16 *)(queries + TERMS * FRAGMENTS * 32);
    float *const heads = (float *)(rows + TERMS * OWN * D);  // queries, if they are made here
    if (PLACES) Heads<Cell>::place(x.heads, group, count, OWN * WARPS, (int)a.splits, heads, D);

    const auto own_bias = [&](int r) { return bias_of(a, batch, row_of(a, batch, group, first_row + r)); };
    const Bias bias[2] = {own_bias(g), own_bias(g + 8)};
    // What is added to the scores of rows g and g + 8 and keys 2 t and 2 t + 1, and of those 8 further.
    const auto added = [&](float (*to)[4], int first) {
#pragma unroll
        for (int i = 0; i < 8; i++) to[i / 4][i % 4] = LOG2_E * bias_at(a, bias[i % 4 / 2], first + 8 * (i / 4) + 2 * t + i % 2);
    };
    const auto sees = [](const float (*added)[4]) {
        bool any = false;
#pragma unroll
        for (int i = 0; i < 8; i++) any |= added[i / 4][i % 4] != -INFINITY;
        return __any_sync(ALL_LANES, any) != 0;
    };
    float ahead[2][4];
    added(ahead, first);

#pragma unroll
    for (int r = warp; r < OWN; r += WARPS) {
        const Row row = row_of(a, batch, group, first_row + r);
        const float *from = !row.real ? nullptr : PLACES ? heads + r * D : query_of(a, batch, row);
        const float u = split_row<Cell, TERMS, 1>(from, a.q.column, x.dense, size, 32, lane, D, r, rows, OWN * D, true);
        if (lane == 0) units[r] = u * (float)a.scale * (cap > 0.0f ? 1.0f : LOG2_E);
    }
    __syncthreads();
    // As tensor cores take them: of a term, fragment and lane four columns of two rows.
    for (int i = warp; i < TERMS * FRAGMENTS; i += WARPS) {
        const int from = i / FRAGMENTS * OWN * D + i % 2 * 4, c = i % FRAGMENTS / 2 * 4 + t;
        const uint2 one = *(const uint2 *)(rows + from + chunk(g, c, D)), two = *(const uint2 *)(rows + from + chunk(g + 8, c, D));
        queries[i * 32 + lane] = make_uint4(one.x, two.x, one.y, two.y);
    }
    __syncthreads();

    float acc[E / 8][4] = {};
    Powers<OWN, true, UP> powers;
    const float unit[2] = {units[g], units[g + 8]}, once[2] = {1.0f, 1.0f};
    const auto load = [&](const Cell *from, i64 step, int key, int c, int there) {
        return c < there ? *(const uint4 *)(from + min(key, key_count - 1) * step + c) : make_uint4(0, 0, 0, 0);
    };
    for (; first < key_count; first += step) {
        const bool hidden = !sees(ahead);
        float extra[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) extra[i / 4][i % 4] = ahead[i / 4][i % 4];
        added(ahead, first + step);
        if (hidden) continue;
        uint4 k[2][D / 32], v[4][E / 64];
        const auto fetch_keys = [&](int j) {
#pragma unroll
            for (int n = 0; n < 2; n++) k[n][j] = load(keys, a.k.row, first + 8 * n + g, 32 * j + 8 * t, size);
        };
        const auto fetch_values = [&](int m) {
#pragma unroll
            for (int i = 0; i < 4; i++) v[i][m] = load(values, a.v.row, first + 8 * (i / 2) + 2 * t + i % 2, 64 * m + 8 * g, width);
        };
        constexpr bool at_once = E <= 128;  // all are on their way where registers allow, else a part of either
        constexpr int KEYS = at_once ? D / 32 : D / 64, VALUES = at_once ? E / 64 : E / 128;
        const auto fetch_some_keys = [&](int j) {
#pragma unroll
            for (int i = 0; i < KEYS; i++) fetch_keys(j + i);
        };
        const auto fetch_some_values = [&](int m) {
#pragma unroll
            for (int i = 0; i < VALUES; i++) fetch_values(m + i);
        };
        fetch_some_keys(0);
        if (at_once) fetch_some_values(0);
        __syncwarp();  // no load waits behind a product

        float s[2][4] = {};
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            if (j > 0 && j % KEYS == 0) fetch_some_keys(j), __syncwarp();
#pragma unroll
            for (int i = 0; i < TERMS; i++) {
                const uint4 one = queries[(i * FRAGMENTS + 2 * j) * 32 + lane], two = queries[(i * FRAGMENTS + 2 * j + 1) * 32 + lane];
                const u32 even[4] = {one.x, one.y, one.z, one.w}, odd[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const u32 b[4] = {k[n][j].x, k[n][j].y, k[n][j].z, k[n][j].w};
                    Pair<Cell>::multiply(s[n], even, b), Pair<Cell>::multiply(s[n], odd, b + 2);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float &score = s[i / 4][i % 4];
            score *= unit[i % 4 / 2];
            if (cap > 0.0f) score = cap * tanhf(score);
            score += extra[i / 4][i % 4];
        }
        if (sees(ahead)) ask(first + step);
        float fade[2];
        powers.take(s, fade, once);
        if (__any_sync(ALL_LANES, fade[0] < 1.0f || fade[1] < 1.0f))
#pragma unroll
            for (int e = 0; e < E / 2; e++) acc[e / 4][e % 4] *= fade[e % 4 / 2];
        u32 p[4][TERMS];
#pragma unroll
        for (int i = 0; i < 4; i++) split<Cell, TERMS>(s[i / 2][2 * (i % 2)], s[i / 2][2 * (i % 2) + 1], p[i]);
#pragma unroll
        for (int m = 0; m < E / 64; m++) {
            if (!at_once && m % VALUES == 0) fetch_some_values(m), __syncwarp();
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const u32 b[2] = {column(v[0][m], v[1][m], j), column(v[2][m], v[3][m], j)};
#pragma unroll
                for (int i = 0; i < TERMS; i++) {
                    const u32 weights[4] = {p[0][i], p[1][i], p[2][i], p[3][i]};
                    Pair<Cell>::multiply(acc[8 * m + j], weights, b);
                }
            }
        }
    }

    // Sums of all warps: column c of a row is number c / 8 % 8 of block 8 (c / 64) + c % 8.
    powers.join();
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (t == 0) states[warp][g + 8 * r] = make_float2(powers.top[r], powers.sum[r] * DOWN);
    __syncthreads();  // queries have been read, too
    const auto top_of = [&](int row) {
        float top = LOWEST;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, states[w][row].x);
        return top;
    };
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float fade = exp2f(powers.top[r] - top_of(g + 8 * r)) * DOWN;
#pragma unroll
        for (int e = 0; e < E / 8; e++)
            *(float2 *)(room + (warp * E / 8 + e) * BLOCK + 8 * (g + 8 * r) + 2 * t) = make_float2(acc[e][2 * r] * fade, acc[e][2 * r + 1] * fade);
    }
    __syncthreads();
    for (int r = 0; r < min(OWN, count - first_row); r++) {
        const Row row = row_of(a, batch, group, first_row + r);
        const float top = top_of(r), as_natural = top / LOG2_E;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total = fmaf(exp2f(states[w][r].x - top), states[w][r].y, total);
        const float share = a.splits > 1 ? 1.0f : share_of(a, row.head, as_natural, total);
        float *target = target_of(a, batch, row, split_number);
        for (int c = threadIdx.x; c < width; c += THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += room[(w * E / 8 + c / 64 * 8 + c % 8) * BLOCK + 8 * r + c / 8 % 8];
            target[c] = sum * share;
        }
        if (a.splits > 1 && threadIdx.x == 0) keep_state(a, row, split_number, as_natural, total);
    }
    SHARED(number, u32);
    if (x.numbers) add_splits(x, batch, group, first_row, number);
}
