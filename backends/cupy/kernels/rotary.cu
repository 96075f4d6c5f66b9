// Rotary position embedding, and sines of timesteps.

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

// By a block.
template <class Cell> __device__ __forceinline__ void place_in_block(const Head<Cell> &a, i64 number, float *row, float *room) {
    if (number == 0) {  // all heads have them in common
        for (i64 j = threadIdx.x; j < a.turns.pairs; j += blockDim.x) a.turns.ask(j);
        if (a.w)
            for (i64 c = threadIdx.x; c < a.columns; c += blockDim.x) prefetch(a.w + c * a.w_step);
    }
    wait_for_earlier();
    place(a, number, row, ByBlock{room});
}
template <class Cell> __global__ void __launch_bounds__(512) place_head(const __grid_constant__ Head<Cell> a) {
    SHARED(room, float[32]);
    DYNAMIC_SHARED(row, float);
    place_in_block(a, blockIdx.x, row, room);
}
// Queries, and the keys and values that they meet.
template <class Cell> struct Heads {
    i64 keys, values;  // the first of their blocks
    Head<float> query;
    Head<Cell> key, value;
};
template <class Cell> __global__ void __launch_bounds__(512, 3) place_heads(const __grid_constant__ Heads<Cell> a) {
    SHARED(room, float[32]);
    DYNAMIC_SHARED(row, float);
    if (blockIdx.x < a.keys) place_in_block(a.query, blockIdx.x, row, room);
    else if (blockIdx.x < a.values) place_in_block(a.key, blockIdx.x - a.keys, row, room);
    else place_in_block(a.value, blockIdx.x - a.values, row, room);
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
