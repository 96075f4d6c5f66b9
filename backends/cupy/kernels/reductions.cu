// What two entries of a row give, taken over all of them: reduced, accumulated, and put where numbers say.

enum Way : i64 { MAX, MIN, SUM, PROD, SET };
// Integers wrap around; NaN stays NaN.
template <class T> __device__ __forceinline__ T plus(T a, T b) { return (T)((u64)a + (u64)b); }
template <class T> __device__ __forceinline__ T times(T a, T b) { return (T)((u64)a * (u64)b); }
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float times(float a, float b) { return a * b; }
template <class T> __device__ __forceinline__ T combined(i64 way, T a, T b) {
    switch (way) {
        case MAX: return a > b || a != a ? a : b;
        case MIN: return a < b || a != a ? a : b;
        case SUM: return plus(a, b);
        case PROD: return times(a, b);
        default: return b;
    }
}
// What changes no entry that it is combined with.
template <class T> struct Least {
    static __device__ __forceinline__ T value() { return (T)((u64)1 << (8 * sizeof(T) - 1)); }
    static __device__ __forceinline__ T most() { return (T)~value(); }
};
template <> struct Least<float> {
    static __device__ __forceinline__ float value() { return -INFINITY; }
    static __device__ __forceinline__ float most() { return INFINITY; }
};
template <class T> __device__ __forceinline__ T nothing(i64 way) {
    return way == MAX ? Least<T>::value() : way == MIN ? Least<T>::most() : way == PROD ? (T)1 : (T)0;
}

template <class T> struct Row {
    i64 columns, step, way;
    Axes axes;  // of the rows
    Walk<const T> x;
    Walk<T> out;
};
// One block for each row.
template <class T> __global__ void reduced(const __grid_constant__ Row<T> a) {
    wait_for_earlier();
    SHARED(room, T[32]);
    const i64 *const steps[] = {a.x.step, a.out.step};
    const Places<2> p = places(a.axes, steps, blockIdx.x);
    const T *x = a.x.at + p.at[0];
    T all = nothing<T>(a.way);
    for (i64 c = threadIdx.x; c < a.columns; c += blockDim.x) all = combined(a.way, all, x[c * a.step]);
#pragma unroll
    for (int by = 16; by > 0; by >>= 1) all = combined(a.way, all, (T)__shfl_xor_sync(ALL_LANES, all, by));
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = all;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 w = 1; w < blockDim.x / 32; w++) all = combined(a.way, all, (T)room[w]);
        a.out.at[p.at[1]] = all;
    }
}
// One warp for each row.
template <class T> __global__ void accumulated(const __grid_constant__ Row<T> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.out.step};
    const Places<2> p = places(a.axes, steps, blockIdx.x);
    const T *x = a.x.at + p.at[0];
    T *out = a.out.at + p.at[1], before = nothing<T>(a.way);
    const int lane = threadIdx.x;
    for (i64 start = 0; start < a.columns; start += 32) {
        const bool inside = start + lane < a.columns;
        T all = inside ? x[(start + lane) * a.step] : nothing<T>(a.way);
#pragma unroll
        for (int by = 1; by < 32; by <<= 1) {
            const T other = __shfl_up_sync(ALL_LANES, all, by);
            if (lane >= by) all = combined(a.way, other, all);
        }
        if (inside) out[start + lane] = combined(a.way, before, all);
        before = combined(a.way, before, (T)__shfl_sync(ALL_LANES, all, 31));
    }
}

// Entry i of a row is combined with entry `ids[i]` of another; one block for each row.  Each thread has entries of its
// own there and takes the numbers in their order, so that the result does not depend on whose turn it is.
template <class T, class Id> struct Put {
    i64 count, size, id_step, x_step, step, way;
    Axes axes;  // of the rows
    Walk<const Id> ids;
    Walk<const T> x;
    Walk<T> out;
    Fault fault;
};
template <class T, class Id> __global__ void put(const __grid_constant__ Put<T, Id> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.ids.step, a.x.step, a.out.step};
    const Places<3> p = places(a.axes, steps, blockIdx.x);
    for (i64 i = 0; i < a.count; i++) {
        const i64 id = a.ids.at[p.at[0] + i * a.id_step];
        if (id < 0 || id >= a.size) {
            if (threadIdx.x == 0) note_fault(a.fault, id);
        } else if ((u64)id % blockDim.x == threadIdx.x) {
            T *entry = a.out.at + p.at[2] + id * a.step;
            *entry = combined(a.way, *entry, a.x.at[p.at[1] + i * a.x_step]);
        }
    }
}
