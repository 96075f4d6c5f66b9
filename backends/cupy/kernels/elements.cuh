// Element by element: threads of a block take elements blockDim.x apart, so that those of a warp lie together.
//
// Where a launch has fewer threads than elements each takes ELEMENTS of them, otherwise one.  All are loaded before the
// first is put, as what is put may be what is loaded next: so their loads are under way together.

constexpr int ELEMENTS = 4;  // as in elementwise.py

// An element of each of two operands.
template <class A, class B> struct Pair {
    A x;
    B y;
};

// `load` is asked for what comes of element `i` with operands at the given places, `put` is given that.  The places are
// those of `places`, in one loop for all elements: what divides and the steps are read once.
template <int N, class Load, class Put>
__device__ __forceinline__ void each_element(i64 count, const Axes &axes, const i64 *const (&steps)[N], Load load, Put put) {
    const u32 all = (u32)count, size = gridDim.x * blockDim.x < all ? ELEMENTS * blockDim.x : blockDim.x;
    const u32 begin = blockIdx.x * size, end = all - begin < size ? all : begin + size;
    const u32 first = begin + threadIdx.x;
    if (begin >= all || first >= end) return;
    u32 rest[ELEMENTS];
    Places<N> p[ELEMENTS];
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) {
        rest[e] = first + e * blockDim.x;
#pragma unroll
        for (int k = 0; k < N; k++) p[e].at[k] = 0;
    }
    for (int a = (int)axes.rank - 1; a > 0; a--) {
        const u32 divisor = (u32)axes.size[a];
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const u32 next = rest[e] / divisor, here = rest[e] - next * divisor;
#pragma unroll
            for (int k = 0; k < N; k++) p[e].at[k] += here * steps[k][a];
            rest[e] = next;
        }
    }
    decltype(load(p[0], first)) loaded[ELEMENTS];
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) {
        const u32 i = first + e * blockDim.x;
#pragma unroll
        for (int k = 0; k < N; k++) p[e].at[k] += rest[e] * steps[k][0];
        if (i < end) loaded[e] = load(p[e], i);
    }
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++)
        if (first + e * blockDim.x < end) put(p[e], loaded[e]);
}
