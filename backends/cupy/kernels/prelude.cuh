// What kernels of all families share: sums over warps and blocks, faults, strides, activations.

// ---------------------------------------------------------------------------------------------------- warps

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int by = 16; by > 0; by >>= 1) x += __shfl_xor_sync(ALL_LANES, x, by);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int by = 16; by > 0; by >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, by));
    return x;
}
// Over all threads of a block of whole warps, at most 1024; every thread gets it.  `room` is shared memory of 32 floats
// that nobody else uses meanwhile.
__device__ __forceinline__ float block_sum(float x, float *room) {
    const u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_sum(x);
    if (warps == 1) return x;
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? room[lane] : 0.0f);
    __syncthreads();
    return x;
}
__device__ __forceinline__ float block_max(float x, float *room) {
    const u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_max(x);
    if (warps == 1) return x;
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = warp_max(lane < warps ? room[lane] : -INFINITY);
    __syncthreads();
    return x;
}

// ---------------------------------------------------------------------------------------------------- faults

// A number that comes from data and is not legal: the first one is kept, the run ends with an error after its last
// launch.  The words are those of `Launches.fault`.
struct Fault {
    u64 *found;  // 1 + which fault it is, or 0; then the number
    i64 which;
};
__device__ __forceinline__ void note_fault(const Fault &f, i64 value) {
    if (atomicCAS(&f.found[0], (u64)0, (u64)(f.which + 1)) == 0) f.found[1] = (u64)value;
}

// --------------------------------------------------------------------------------------------------- strides

// As axes.py gives them: axes from the outermost, and the step of an operand along each.
constexpr int MOST_AXES = 10;
struct Axes {
    i64 rank, size[MOST_AXES];
};
template <class T> struct Walk {
    T *at;
    i64 step[MOST_AXES];
};

// Where element `i` of the walked shape lies in each of N operands; elements are fewer than 2^32.
template <int N> struct Places {
    i64 at[N];
};
template <int N> __device__ __forceinline__ Places<N> places(const Axes &axes, const i64 *const (&steps)[N], u32 i) {
    Places<N> p;
#pragma unroll
    for (int k = 0; k < N; k++) p.at[k] = 0;
    for (int a = (int)axes.rank - 1; a > 0; a--) {
        const u32 size = (u32)axes.size[a], next = i / size, here = i - next * size;
#pragma unroll
        for (int k = 0; k < N; k++) p.at[k] += here * steps[k][a];
        i = next;
    }
#pragma unroll
    for (int k = 0; k < N; k++) p.at[k] += i * steps[k][0];
    return p;
}

// Weights that are kept in 16 bits, told apart by their type.
struct half_bits {
    u16 bits;
};
struct bf16_bits {
    u16 bits;
};
__device__ __forceinline__ float to_float(half_bits x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(bf16_bits x) { return bf16_to_float(x.bits); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(i8 x) { return x; }
__device__ __forceinline__ float to_float(i16 x) { return x; }
__device__ __forceinline__ float to_float(i32 x) { return (float)x; }
__device__ __forceinline__ float to_float(i64 x) { return (float)x; }
__device__ __forceinline__ float logistic(float x) {  // without overflow
    const float e = expf(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}
__device__ __forceinline__ float silu(float x) { return x * logistic(x); }
__device__ __forceinline__ float gelu(float x) { return x * logistic(1.5957691216057308f * (x + 0.044715f * x * x * x)); }
