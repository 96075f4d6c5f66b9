// Columns threadIdx.x, threadIdx.x + blockDim.x, ... of `count`: TOGETHER are loaded before the first is taken.  A loop
// that takes each as it comes waits for memory as often as a thread has columns, since what it writes may be what it reads next.
template <int TOGETHER = 8, class Load, class Take>
__device__ __forceinline__ void each_column(i64 count, Load load, Take take) {
    for (i64 from = threadIdx.x; from < count; from += TOGETHER * blockDim.x) {
        decltype(load(from)) loaded[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (from + i * blockDim.x < count) loaded[i] = load(from + i * blockDim.x);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (from + i * blockDim.x < count) take(from + i * blockDim.x, loaded[i]);
    }
}
