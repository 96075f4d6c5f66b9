// Rotary position embedding, and sines of timesteps.

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
struct Rope {
    i64 count, step, out_step;
    Turns turns;
    Axes axes;  // of the rows
    Walk<const float> x;
    Walk<float> out;
    Walk<const i32> positions;
};
__global__ void rope(const __grid_constant__ Rope a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const u32 row = i / (u32)a.turns.pairs, j = i % (u32)a.turns.pairs;
    const i64 *const steps[] = {a.x.step, a.out.step, a.positions.step};
    const Places<3> p = places(a.axes, steps, row);
    const float *x = a.x.at + p.at[0];
    float *out = a.out.at + p.at[1];
    a.turns.pair(j, a.positions.at + p.at[2], [&](i64 c) { return x[c * a.step]; },
                 [&](i64 c, float value) { out[c * a.out_step] = value; });
}

// A head on its way to attention, by one block: divided by its root mean square and multiplied by w, turned, and put where
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
template <class Cell> __device__ __forceinline__ void place(const Head<Cell> &a, i64 number, float *row, float *room) {
    const i64 *const steps[] = {a.x.step, a.positions.step};
    const Places<2> p = places(a.axes, steps, number);
    if (number == 0) {  // all heads have them in common
        for (i64 j = threadIdx.x; j < a.turns.pairs; j += blockDim.x) a.turns.ask(j);
        if (a.w)
            for (i64 c = threadIdx.x; c < a.columns; c += blockDim.x) prefetch(a.w + c * a.w_step);
    }
    wait_for_earlier();
    float *const saved = a.saved + number * a.columns;
    const float *x = a.x.at + p.at[0];
    float squares = 0.0f;
    for (i64 c = threadIdx.x; c < a.columns; c += blockDim.x) {
        const float value = row[c] = x[c * a.step];
        squares += value * value;
    }
    if (a.w) {  // each thread for the entries that it has brought
        const float factor = 1.0f / sqrtf(block_sum(squares, room) / (float)a.columns + (float)a.eps);
        for (i64 c = threadIdx.x; c < a.columns; c += blockDim.x) row[c] = row[c] * factor * a.w[c * a.w_step];
    }
    __syncthreads();
    if (a.ids) {
        const i64 id = a.ids[number / a.heads];
        if (id < 0 || id >= a.cache_rows) {
            if (threadIdx.x == 0) note_fault(a.fault, id);
            return;
        }
        number = id * a.heads + number % a.heads;
    }
    Cell *out = a.out + number * a.columns;
    auto put = [&](i64 c, float value) {
        if (a.saved) saved[c] = to_float(out[c]);
        put_cell(out + c, value);
    };
    for (i64 j = threadIdx.x; j < a.turns.pairs; j += blockDim.x)
        a.turns.pair(j, a.positions.at + p.at[1], [&](i64 c) { return row[c]; }, put);
    const i64 end = a.turns.low + 2 * a.turns.pairs;
    for (i64 c = threadIdx.x; c < a.columns; c += blockDim.x)
        if (c < a.turns.low || c >= end) put(c, row[c]);
}

template <class Cell> __global__ void __launch_bounds__(512) place_head(const __grid_constant__ Head<Cell> a) {
    SHARED(room, float[32]);
    DYNAMIC_SHARED(row, float);
    place(a, blockIdx.x, row, room);
}
// Queries, and the keys and values that they meet.
template <class Cell> struct Heads {
    i64 keys, values;  // the first of their blocks
    Head<float> query;
    Head<Cell> key, value;
};
template <class Cell> __global__ void __launch_bounds__(512) place_heads(const __grid_constant__ Heads<Cell> a) {
    SHARED(room, float[32]);
    DYNAMIC_SHARED(row, float);
    if (blockIdx.x < a.keys) place(a.query, blockIdx.x, row, room);
    else if (blockIdx.x < a.values) place(a.key, blockIdx.x - a.keys, row, room);
    else place(a.value, blockIdx.x - a.values, row, room);
}

struct Timesteps {
    i64 count, width, half;
    const double *inverse;
    Axes axes;
    Walk<const float> x;
    float *out;
};
__global__ void timesteps(const __grid_constant__ Timesteps a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const u32 row = i / (u32)a.width, c = i % (u32)a.width, j = c % (u32)max(a.half, (i64)1);
    const i64 *const steps[] = {a.x.step};
    const Places<1> p = places(a.axes, steps, row);
    const double angle = (double)a.x.at[p.at[0]] * a.inverse[j];
    float sine, cosine;
    turn(angle, &sine, &cosine);
    if (angle == 0.0) sine = (float)angle;  // `turn` loses the sign of -0
    a.out[i] = c < a.half ? cosine : c < 2 * a.half ? sine : 0.0f;
}
