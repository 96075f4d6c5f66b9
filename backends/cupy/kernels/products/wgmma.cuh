// What kernels for architecture sm_90a alone use besides cuda.cuh, in the same way: inline PTX on a device, the emulation's
// version elsewhere.  Above all products of a warpgroup, which is four warps from a multiple of four on.
//
// A product reads its operands from shared memory, and adds to registers, some time before the matching wait ends.  Until
// then the operands stay as they are and nobody touches the registers; what threads wrote to shared memory it sees behind
// `show_to_products` of each of them and a barrier.

// Where products and copies find a byte of shared memory.
__device__ __forceinline__ u32 shared_address(const void *p) {
#ifdef HOCKET_EMULATED
    return emulation::shared_address(p);
#else
    return (u32)__cvta_generic_to_shared(p);
#endif
}
// An operand whose rows of 128 bytes follow each other from a multiple of 1024 on, with piece p of 16 bytes of row r in the
// place of piece p ^ r % 8.  One more is 16 bytes further: the next 16 columns are 2 more, and 64 rows 512.
__device__ __forceinline__ u64 operand_at(const void *rows) {
    constexpr u64 SWIZZLED_128 = (u64)1 << 62, EIGHT_ROWS = (u64)(1024 / 16) << 32, UNUSED = (u64)1 << 16;
    return SWIZZLED_128 | EIGHT_ROWS | UNUSED | (shared_address(rows) & 0x3ffff) >> 4;
}
// What this thread wrote to shared memory, products see that begin behind the next barrier.
__device__ __forceinline__ void show_to_products() {
#ifdef HOCKET_EMULATED
    emulation::show_to_products();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Stands before products whose registers anything else has touched.
__device__ __forceinline__ void wgmma_fence() {
#ifdef HOCKET_EMULATED
    emulation::fence_registers();
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#ifdef HOCKET_EMULATED
    emulation::commit_products();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// The next number of a word: 0, 1, ...  Who gets one sees what those before did until then, also in other blocks.
__device__ __forceinline__ u32 take_number(u32 *word) {
#ifdef HOCKET_EMULATED
    return emulation::take_number(word);
#else
    u32 number;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(number) : "l"(word) : "memory");
    return number;
#endif
}

#define TEN(tens) \
    "%" tens "0,%" tens "1,%" tens "2,%" tens "3,%" tens "4,%" tens "5,%" tens "6,%" tens "7,%" tens "8,%" tens "9,"
#define OF_128                                                                                                           \
    TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") TEN("6") TEN("7") TEN("8") TEN("9") TEN("10") TEN("11")         \
    "%120,%121,%122,%123,%124,%125,%126,%127"
#define EIGHT(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ALL_128(d)                                                                                                       \
    EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40), EIGHT(d, 48), EIGHT(d, 56),        \
    EIGHT(d, 64), EIGHT(d, 72), EIGHT(d, 80), EIGHT(d, 88), EIGHT(d, 96), EIGHT(d, 104), EIGHT(d, 112), EIGHT(d, 120)

// Until all but the last `pending` groups are there; then `d` is what products made of it.
template <int pending> __device__ __forceinline__ void wgmma_wait(float (&d)[128]) {
#ifdef HOCKET_EMULATED
    emulation::wait_for_products(pending);
#else
    asm volatile("wgmma.wait_group.sync.aligned %128;" : ALL_128(d) : "n"(pending) : "memory");
#endif
}
// d += a b for a of 64 x 16 and b of 16 x 256 (wgmma.m64n256k16), whose columns lie as rows do: of warp w of the group,
// with g = lane / 4 and t = lane % 4, d[r] is of row 16 w + g + 8 (r / 2 % 2) and column 8 (r / 4) + 2 t + r % 2.
#ifdef HOCKET_EMULATED
#define WGMMA(type, number)                                                                     \
    emulation::begin_product(d, 256, a, b, [](u32 bits) -> float { return number((u16)bits); })
#else
#define WGMMA(type, number)                                                                                          \
    asm volatile("{.reg .pred adds; setp.eq.u32 adds, 0, 0;"                                                         \
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" OF_128 "}, %128, %129, adds, 1, 1, 0, 0;}" \
                 : ALL_128(d) : "l"(a), "l"(b) : "memory")
#endif
__device__ __forceinline__ void wgmma(float (&d)[128], u64 a, u64 b, bf16_bits) { WGMMA("bf16", bf16_to_float); }
__device__ __forceinline__ void wgmma(float (&d)[128], u64 a, u64 b, half_bits) { WGMMA("f16", half_to_float); }
