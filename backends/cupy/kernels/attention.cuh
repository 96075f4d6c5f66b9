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
    float *at;
    i64 batch, row, head, column;
};
struct Args {
    View q, k, v, mask, out;
    const float *sinks;
    i64 sink_step;
    const float *slopes;  // of each head, or null for 1
    i64 tokens, shared, groups, keys, size, width, mask_heads, splits;
    double scale, cap;
    float *sums, *state;  // of each split: values added up; highest score and sum of weights
};

__device__ __forceinline__ float grown(float x) { return exp2f(x * LOG2_E); }

struct Row {
    i64 token, head, number;
    bool real;
};
// Row `i` of those that share a key head; the last one again where there are fewer.
__device__ __forceinline__ Row row_of(const Args &a, i64 batch, i64 group, i64 i) {
    const i64 count = a.tokens * a.shared, there = min(i, count - 1), token = there / a.shared;
    const i64 head = group * a.shared + there % a.shared;
    return {token, head, (batch * a.tokens + token) * a.groups * a.shared + head, i < count};
}
__device__ __forceinline__ const float *mask_of(const Args &a, i64 batch, const Row &row) {
    if (a.mask.at == nullptr) return nullptr;
    return a.mask.at + batch * a.mask.batch + row.token * a.mask.row + row.head % a.mask_heads * a.mask.head;
}
__device__ __forceinline__ float slope_of(const Args &a, const Row &row) { return a.slopes ? a.slopes[row.head] : 1.0f; }
// What is added to the score of a key.
__device__ __forceinline__ float bias_of(const Args &a, const float *mask, float slope, i64 key) {
    if (key >= a.keys) return -INFINITY;
    return mask ? slope * mask[key * a.mask.column] : 0.0f;
}
__device__ __forceinline__ float capped(const Args &a, float score) {
    const float cap = (float)a.cap;
    return cap > 0.0f ? cap * tanhf(score / cap) : score;
}
// What sums of values are multiplied by once all keys and the sink have joined; 0 for a row that sees nothing.
__device__ __forceinline__ float share_of(const Args &a, i64 head, float top, float sum) {
    if (a.sinks == nullptr) return sum > 0.0f ? 1.0f / sum : 0.0f;
    const float sink = a.sinks[head * a.sink_step], high = fmaxf(top, sink), fade = grown(top - high);
    const float total = sum * fade + grown(sink - high);
    return total > 0.0f ? fade / total : 0.0f;
}
// Where a row's result goes, or its sum over a split.
__device__ __forceinline__ float *target_of(const Args &a, i64 batch, const Row &row, i64 split) {
    if (a.splits > 1) return a.sums + (row.number * a.splits + split) * a.width;
    return a.out.at + batch * a.out.batch + row.token * a.out.row + row.head * a.out.head;
}
__device__ __forceinline__ void keep_state(const Args &a, const Row &row, i64 split, float top, float sum) {
    float *state = a.state + 2 * (row.number * a.splits + split);
    state[0] = top, state[1] = sum;
}
