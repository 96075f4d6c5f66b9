// Rotary position embedding, and sines of timesteps.

// The angle is a product of doubles, brought near 0 before it becomes a float.
__device__ __forceinline__ void turn(double angle, float *sine, float *cosine) {
    const double whole = rint(angle * 0.15915494309189535);
    const float x = (float)fma(-whole, 6.283185307179586, angle);
    *sine = sinf(x);
    *cosine = cosf(x);
}

struct Rope {
    i64 count, pairs, low, low_step, high, step, out_step;  // pair j: entries low + j low_step, and `high` behind it
    i64 position_step;                                      // between the positions of one token
    double magnitude;
    const double *inverse;  // of each pair
    const i32 *plane;       // which of the positions turns a pair
    const float *factors;   // that divide the angles; or null
    i64 factor_step;
    Axes axes;              // of the rows
    Walk<const float> x;
    Walk<float> out;
    Walk<const i32> positions;
};
__global__ void rope(const __grid_constant__ Rope a) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const u32 row = i / (u32)a.pairs, j = i % (u32)a.pairs;
    const i64 *const steps[] = {a.x.step, a.out.step, a.positions.step};
    const Places<3> p = places(a.axes, steps, row);
    const i32 position = a.positions.at[p.at[2] + a.plane[j] * a.position_step];
    const double inverse = a.factors ? a.inverse[j] / (double)a.factors[j * a.factor_step] : a.inverse[j];
    float sine, cosine;
    turn(position * inverse, &sine, &cosine);
    sine *= (float)a.magnitude;
    cosine *= (float)a.magnitude;
    const i64 low = a.low + j * a.low_step, high = low + a.high;
    const float x = a.x.at[p.at[0] + low * a.step], y = a.x.at[p.at[0] + high * a.step];
    a.out.at[p.at[1] + low * a.out_step] = x * cosine - y * sine;
    a.out.at[p.at[1] + high * a.out_step] = x * sine + y * cosine;
}

struct Timesteps {
    i64 count, width, half;
    const double *inverse;
    Axes axes;
    Walk<const float> x;
    float *out;
};
__global__ void timesteps(const __grid_constant__ Timesteps a) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const u32 row = i / (u32)a.width, c = i % (u32)a.width, j = c % (u32)max(a.half, (i64)1);
    const i64 *const steps[] = {a.x.step};
    const Places<1> p = places(a.axes, steps, row);
    float sine, cosine;
    turn((double)a.x.at[p.at[0]] * a.inverse[j], &sine, &cosine);
    a.out[i] = c < a.half ? cosine : c < 2 * a.half ? sine : 0.0f;
}
