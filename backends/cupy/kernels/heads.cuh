// Heads on their way to attention.

// The angle is a product of doubles, brought near 0 before it becomes a float.
__device__ __forceinline__ void turn(double angle, float *sine, float *cosine) {
    const double whole = rint(angle * 0.15915494309189535);
    const float x = (float)fma(-whole, 6.283185307179586, angle);
    *sine = sinf(x);
    *cosine = cosf(x);
}

struct Turns {
    i64 pairs, low, low_step, high;  // pair j: entries low + j low_step, and `high` behind it
    i64 position_step;               // between the positions of one token
    double magnitude;
    const double *inverse;  // of each pair
    const i32 *plane;       // which of the positions turns a pair
    const float *factors;   // that divide the angles; or null
    i64 factor_step;
    // Asks for what turns pair j.
    __device__ __forceinline__ void ask(i64 j) const {
        prefetch(inverse + j), prefetch(plane + j);
        if (factors) prefetch(factors + j * factor_step);
    }
    // Pair j of a row whose entries are read and written by number.
    template <class From, class To> __device__ __forceinline__ void pair(i64 j, const i32 *positions, From from, To to) const {
        const i32 position = positions[plane[j] * position_step];
        const double by = factors ? inverse[j] / (double)factors[j * factor_step] : inverse[j];
        float sine, cosine;
        turn(position * by, &sine, &cosine);
        sine *= (float)magnitude;
        cosine *= (float)magnitude;
        const i64 first = low + j * low_step, second = first + high;
        const float x = from(first), y = from(second);
        to(first, x * cosine - y * sine);
        to(second, x * sine + y * cosine);
    }
};
// A head on its way to attention, by one block or warp: divided by its root mean square and multiplied by w, turned, and put where
// it goes, or into a row of a cache, of which the entries that were there are saved.  Each of it only if it is asked for.
template <class Cell> struct Head {
    i64 columns, heads, step, w_step;  // `heads` of a token fill a row of the cache
    double eps;
    const float *w;  // or null
    Turns turns;     // of no pairs
    Axes axes;       // of the heads
    Walk<const float> x;
    Walk<const i32> positions;
    Cell *out;  // dense, or the cache
    const i32 *ids;
    i64 cache_rows;
    float *saved;  // dense; or null
    Fault fault;
};
// The threads that make a head, and how: those of a block, or of a warp, which has up to 256 columns.  Sums have one order for
// each number of columns: that of as many warps as `choose_row_threads` says.
struct ByBlock {
    float *room;  // of `block_sum`
    static __device__ __forceinline__ u32 thread() { return threadIdx.x; }
    static __device__ __forceinline__ u32 threads() { return blockDim.x; }
    static __device__ __forceinline__ void sync() { __syncthreads(); }
    template <class Bring> __device__ __forceinline__ float squares(i64 columns, Bring bring) const {
        float sum = 0.0f;
        for (i64 c = threadIdx.x; c < columns; c += blockDim.x) {
            const float value = bring(c);
            sum = fmaf(value, value, sum);
        }
        return block_sum(sum, room);
    }
};
struct ByWarp {
    static __device__ __forceinline__ u32 thread() { return threadIdx.x % 32; }
    static __device__ __forceinline__ u32 threads() { return 32; }
    static __device__ __forceinline__ void sync() { __syncwarp(); }
    template <class Bring> __device__ __forceinline__ float squares(i64 columns, Bring bring) const {
        const int warps = columns > 128 ? 2 : 1;
        float total = 0.0f;
        for (int part = 0; part < warps; part++) {
            float sum = 0.0f;
#pragma unroll 4
            for (int c = 32 * part + (int)thread(); c < (int)columns; c += 32 * warps) {
                const float value = bring(c);
                sum = fmaf(value, value, sum);
            }
            sum = warp_sum(sum);
            total = part ? total + sum : sum;
        }
        return total;
    }
};
// Brings head `number` to `row`, which is shared memory, divided and multiplied.
template <class Cell, class Threads> __device__ __forceinline__ void bring_head(const Head<Cell> &a, const float *x, float *row, Threads by) {
    const auto bring = [&](i64 c) { return row[c] = x[c * a.step]; };
    if (a.w) {  // each thread for the entries that it has brought
        const float factor = 1.0f / sqrtf(by.squares(a.columns, bring) / (float)a.columns + (float)a.eps);
        for (i64 c = by.thread(); c < a.columns; c += by.threads()) row[c] = row[c] * factor * a.w[c * a.w_step];
    } else {
        for (i64 c = by.thread(); c < a.columns; c += by.threads()) bring(c);
    }
    by.sync();
}
// Turns the head in `row`; `put` gets each column of it.
template <class Cell, class Threads, class Put>
__device__ __forceinline__ void turn_head(const Head<Cell> &a, const i32 *positions, const float *row, Threads by, Put put) {
    for (i64 j = by.thread(); j < a.turns.pairs; j += by.threads()) a.turns.pair(j, positions, [&](i64 c) { return row[c]; }, put);
    const i64 end = a.turns.low + 2 * a.turns.pairs;
    for (i64 c = by.thread(); c < a.columns; c += by.threads())
        if (c < a.turns.low || c >= end) put(c, row[c]);
}
template <class Cell> __device__ __forceinline__ Places<2> places_of(const Head<Cell> &a, i64 number) {
    const i64 *const steps[] = {a.x.step, a.positions.step};
    return places(a.axes, steps, number);
}
// Makes head `number` and puts it where it goes.
template <class Cell, class Threads> __device__ __forceinline__ void place(const Head<Cell> &a, i64 number, float *row, Threads by) {
    const Places<2> p = places_of(a, number);
    bring_head(a, a.x.at + p.at[0], row, by);
    float *const saved = a.saved + number * a.columns;
    if (a.ids) {
        const i64 id = a.ids[number / a.heads];
        if (id < 0 || id >= a.cache_rows) {
            if (by.thread() == 0) note_fault(a.fault, id);
            return;
        }
        number = id * a.heads + number % a.heads;
    }
    Cell *out = a.out + number * a.columns;
    turn_head(a, a.positions.at + p.at[1], row, by, [&](i64 c, float value) {
        if (a.saved) saved[c] = to_float(out[c]);
        put_cell(out + c, value);
    });
}
