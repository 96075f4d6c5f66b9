// Words by which the blocks of a launch learn who comes last.  They are 0 before a launch and behind it.

// The next number of a word: 0, 1, ...  Who gets one sees what those before did until then, also in other blocks.
__device__ __forceinline__ u32 take_number(u32 *word) {
#ifdef HOCKET_EMULATED
    return emulation::take_number(word);
#elif defined(__HIP__)
    return __hip_atomic_fetch_add(word, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
#else
    u32 number;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(number) : "l"(word) : "memory");
    return number;
#endif
}
