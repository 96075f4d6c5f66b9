// The multiprocessor of each block.  All blocks wait as long, so that none takes the place of another.
struct Visit {
    i64 *numbers;
    i64 nanoseconds;
};
__device__ __forceinline__ i64 multiprocessor_number() {
#ifdef HOCKET_EMULATED
    return 0;
#else
    u32 number;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
    return number;
#endif
}
__global__ void __launch_bounds__(32) visit(const __grid_constant__ Visit a) {
    wait_for_earlier();
    const u64 since = nanoseconds();
    while (nanoseconds() - since < (u64)a.nanoseconds) continue;
    if (threadIdx.x == 0) a.numbers[blockIdx.x] = multiprocessor_number();
}
