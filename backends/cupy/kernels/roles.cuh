// What warps of one block with different work use besides cuda.cuh, in the same way: inline PTX on a device, the emulation's
// version elsewhere.  Named barriers need sm_70, registers that warps give to others need sm_90a.

// Wait until `threads` threads, whole warps, have arrived at barrier `id`, from 1 to 15, this one included.
__device__ __forceinline__ void sync_named(u32 id, u32 threads) {
#ifdef HOCKET_EMULATED
    emulation::sync_named(id, threads);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
// Arrive at a named barrier without a wait, for example after the last read of a buffer that other warps fill.
__device__ __forceinline__ void arrive_named(u32 id, u32 threads) {
#ifdef HOCKET_EMULATED
    emulation::arrive_named(id, threads);
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
// Change the registers of each thread of a warpgroup; all of its warps do so.  What one releases, another may take: it waits
// for that.  A block begins with those for which it was compiled.
template <u32 count> __device__ __forceinline__ void release_registers() {
#ifdef HOCKET_EMULATED
    emulation::set_max_registers(count, false);
#else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
#endif
}
template <u32 count> __device__ __forceinline__ void take_registers() {
#ifdef HOCKET_EMULATED
    emulation::set_max_registers(count, true);
#else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
#endif
}
// Words of the blocks of one device.  One thread increments a word behind a barrier of those for which it speaks; one thread
// waits for a count before a barrier of those that go on.  The blocks run at the same time.
__device__ __forceinline__ void increment_for_device(u64 *word) {
#ifdef HOCKET_EMULATED
    emulation::increment_word("release.gpu", word);
#else
    asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(word) : "memory");
#endif
}
__device__ __forceinline__ void wait_for_device(const u64 *word, u64 target) {
#ifdef HOCKET_EMULATED
    emulation::wait_for_word("acquire.gpu", word, target);
#else
    u64 now;
    do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(word) : "memory");
    while (now < target);
#endif
}
