// Attention with a streaming softmax.  A key head serves `shared` heads of the queries; the rows that meet its keys, a
// token and one of these heads each, are taken together, so that keys and values are read once for all of them.
//
// Few rows: `attend_few`, key by key.  Many: `attend_tiles` on tensor cores, with every float as two halves (times a
// power of two for each row), of which three products are as near as float32.  Either may share the keys among blocks
// (`splits`), whose sums of values `attention_combine` adds up in order.

constexpr float LOWEST = -1e38f;  // below every score that is not masked
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;

struct View {  // of q, k, v, mask and out; a row is a token or a key, a column of the mask a key
    float *at;  // of keys and values: cells
    i64 batch, row, head, column;

    template <class Cell> __device__ __forceinline__ CellReader<Cell> cells(int number, int group) const {
        return (CellReader<Cell>)(const Cell *)at + (number * batch + group * head);
    }
};
struct Args {
    View q, k, v, mask, out;
    const float *sinks;
    i64 sink_step;
    const float *slopes;  // of each head, or null for 1
    i64 tokens, shared, groups, keys, size, width, mask_heads, splits;
    double scale, cap;    // scores are scale q k, or cap tanh(scale q k) where cap is not 0
    float *sums, *state;  // of each split: values added up; highest score and sum of weights
};

__device__ __forceinline__ float grown(float x) { return exp2f(x * LOG2_E); }

struct Row {
    int token, head;
    i64 number;  // of the result
    bool real;
};
// Row `i` of those that share a key head; the last one again where there are fewer.
__device__ __forceinline__ Row row_of(const Args &a, int batch, int group, int i) {
    const int shared = (int)a.shared, count = (int)a.tokens * shared, there = min(i, count - 1), token = there / shared;
    const int head = group * shared + there % shared;
    return {token, head, (batch * a.tokens + token) * a.groups * shared + head, i < count};
}
__device__ __forceinline__ const float *query_of(const Args &a, int batch, const Row &row) {
    return a.q.at + batch * a.q.batch + row.token * a.q.row + row.head * a.q.head;
}
struct Bias {  // of the keys of a row
    const float *mask;
    float slope;
};
__device__ __forceinline__ Bias bias_of(const Args &a, int batch, const Row &row) {
    if (a.mask.at == nullptr) return {nullptr, 1.0f};
    const float *mask = a.mask.at + batch * a.mask.batch + row.token * a.mask.row + row.head % (int)a.mask_heads * a.mask.head;
    return {mask, a.slopes ? a.slopes[row.head] : 1.0f};
}
// What is added to the score of a key.
__device__ __forceinline__ float bias_at(const Args &a, const Bias &bias, int key) {
    if (key >= a.keys) return -INFINITY;
    return bias.mask ? bias.slope * bias.mask[key * a.mask.column] : 0.0f;
}
// What sums of values are multiplied by once all keys and the sink have joined; 0 for a row that sees nothing.
__device__ __forceinline__ float share_of(const Args &a, int head, float top, float sum) {
    if (a.sinks == nullptr) return sum > 0.0f ? 1.0f / sum : 0.0f;
    const float sink = a.sinks[head * a.sink_step], high = fmaxf(top, sink), fade = grown(top - high);
    const float total = sum * fade + grown(sink - high);
    return total > 0.0f ? fade / total : 0.0f;
}
// Where a row's result goes, or its sum over a split.
__device__ __forceinline__ float *target_of(const Args &a, int batch, const Row &row, int split) {
    if (a.splits > 1) return a.sums + (row.number * a.splits + split) * a.width;
    return a.out.at + batch * a.out.batch + row.token * a.out.row + row.head * a.out.head;
}
__device__ __forceinline__ void keep_state(const Args &a, const Row &row, int split, float top, float sum) {
    float *state = a.state + 2 * (row.number * a.splits + split);
    state[0] = top, state[1] = sum;
}

// ----------------------------------------------------------------------------------------------------------- tiles

constexpr int ROWS = 64;  // of a tile

enum { HIDDEN, MIXED, OPEN };  // no key of a tile is seen by any row; all are by all, and nothing is added

struct Tiles {
    Args a;
    u16 *k, *v;               // of each batch, key head and tile of keys: high halves, then low ones
    float *k_units, *v_units; // of each batch, key head and key: what its halves are multiples of
    i32 *seen;                // of each batch, key head, tile of rows and tile of keys; null if all is
    i64 seen_batch, seen_head, tiles, tile, rows;  // `tile` keys and `rows` of a tile
    i64 dense, vectors;  // queries come in eights; keys and values do
};

// Numbers of 16 bits on tensor cores.
template <class Cell> struct Pair;
template <> struct Pair<half_bits> {
    static constexpr int TERMS = 2;  // whose sum is as near as float32
    static __device__ __forceinline__ u32 pack(float x, float y) { return pack_half(x, y); }
    static __device__ __forceinline__ void multiply(float *d, const u32 *a, const u32 *b) { mma_f16(d, a, b); }
};
template <> struct Pair<bf16_bits> {
    static constexpr int TERMS = 3;
    static __device__ __forceinline__ u32 pack(float x, float y) { return pack_bf16(x, y); }
    static __device__ __forceinline__ void multiply(float *d, const u32 *a, const u32 *b) { mma_bf16(d, a, b); }
};
// Two floats as sums of cells: each term is what those before lack.  An infinity is only the last term, which no other
// last term meets, so that products with finite numbers have no NaN.
template <class Cell, int TERMS, bool FINITE = true> __device__ __forceinline__ void split(float x, float y, u32 *terms) {
#pragma unroll
    for (int i = 0; i < TERMS; i++) {
        if (!FINITE && i + 1 < TERMS) {
            terms[i] = Pair<Cell>::pack(fabsf(x) < INFINITY ? x : 0.0f, fabsf(y) < INFINITY ? y : 0.0f);
        } else {
            terms[i] = Pair<Cell>::pack(x, y);
        }
        x -= to_float(Cell{(u16)terms[i]}), y -= to_float(Cell{(u16)(terms[i] >> 16)});
    }
}
// Where eight columns of a row lie in a tile of `columns`: rows that are read together lie in different banks.
__device__ __forceinline__ int chunk(int row, int c, int columns) { return row * columns + 8 * (c ^ (row & 7)); }
// `chunk` of one of two neighbours, for the lane: `turned` is which of them, by the lowest bit of its own, and its row.
__device__ __forceinline__ int pair(int row, int even, int turned, int columns) {
    return row * columns + 8 * ((even & ~7) + ((even & 6) ^ turned));
}

// The `lanes` that share a row turn it into sums of cells, multiples of a power of two for the row, which all of them get.
// Lane `first` has eight columns from 8 first on, and those 8 lanes further, up to EIGHTS times; they go to row `number` of a
// tile of `columns`, of which each term has one, `apart` from the last.  A row that is null is zeros.
// The power of two comes from the finite columns, so that an infinity or a NaN leaves the other columns of its row right.
template <class To, int TERMS, int EIGHTS, class From>
__device__ __forceinline__ float split_row(const From row, i64 step, bool dense, int size, int lanes, int first, int columns, int number, u16 *tile, int apart, bool writes) {
    float x[EIGHTS][8], most = 0.0f;
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        const int at = 8 * (first + j * lanes);
        if (dense && row && at < size) {
            eight_cells(x[j], row + at);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) x[j][i] = row && at + i < size ? to_float(row[(at + i) * step]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(x[j][i]) < INFINITY ? fabsf(x[j][i]) : 0.0f);
    }
    for (int by = lanes / 2; by > 0; by >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, by));
    const int exponent = min(max((int)(__float_as_uint(most) >> 23), 15), 254) - 14;  // the largest becomes 2^14 or more
    const float up = __uint_as_float((u32)(254 - exponent) << 23), unit = __uint_as_float((u32)exponent << 23);
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        const int c = first + j * lanes, to = chunk(number, c, columns);
        u32 terms[4][TERMS];
#pragma unroll
        for (int i = 0; i < 4; i++) split<To, TERMS, false>(x[j][2 * i] * up, x[j][2 * i + 1] * up, terms[i]);
        if (writes && 8 * c < columns)
#pragma unroll
            for (int i = 0; i < TERMS; i++)
                *(uint4 *)(tile + i * apart + to) = make_uint4(terms[0][i], terms[1][i], terms[2][i], terms[3][i]);
    }
    return row ? unit : 0.0f;
}
