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
// The first multiple of 1024 in shared memory that a launch sizes.
template <class S> __device__ __forceinline__ S *aligned(u8 *room) { return (S *)(room + (-shared_address(room) & 1023)); }
// Where products look for eight columns of a row.
__device__ __forceinline__ int swizzled(int row, int piece) { return (piece ^ row % 8) * 8; }
// An operand whose rows of 128 bytes follow each other from a multiple of 1024 on, with piece p of 16 bytes of row r in the
// place of piece p ^ r % 8.  One more is 16 bytes further.  Of rows that are summed over the next 64 columns lie `apart`
// bytes further.
__device__ __forceinline__ u64 operand_at(const void *rows, int apart = 16) {
    constexpr u64 SWIZZLED_128 = (u64)1 << 62, EIGHT_ROWS = (u64)(1024 / 16) << 32;
    return SWIZZLED_128 | EIGHT_ROWS | (u64)(apart / 16) << 16 | (shared_address(rows) & 0x3ffff) >> 4;
}
constexpr u64 STEP = 2, ROW = 8;  // of operands, to the next 16 columns and to the next row
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

// d += a b for a of 64 x 16, whose rows lie in shared memory, and b of 16 x N, whose columns lie as those rows do
// (wgmma.m64nNk16): of warp w of the group, with g = lane / 4 and t = lane % 4, d[r] is of row 16 w + g + 8 (r / 2 % 2) and
// column 8 (r / 4) + 2 t + r % 2.  `wgmma_first` is d = a b.
//
// With a in registers, a[r] holds the pair of columns 2 t + 8 (r / 2) of row 16 w + g + 8 (r % 2), and the rows of b lie in
// shared memory.
//
// `wgmma_wait` returns when all but the last `pending` groups are over; then `d` is what products made of it.  Before a
// fence of `d`, it is what was made of it there.
#ifdef HOCKET_EMULATED
template <int pending, int N> __device__ __forceinline__ void wgmma_wait(float (&)[N]) { emulation::wait_for_products(pending); }
template <int N> __device__ __forceinline__ void wgmma_fence(float (&)[N]) { emulation::fence_registers(); }
template <class T> float number_of(unsigned bits) { return to_float(T{(u16)bits}); }
template <int N, class T> __device__ __forceinline__ void wgmma(float (&d)[N], u64 a, u64 b, T) {
    emulation::begin_product(d, 2 * N, true, a, nullptr, b, number_of<T>);
}
template <int N, class T> __device__ __forceinline__ void wgmma_first(float (&d)[N], u64 a, u64 b, T) {
    emulation::begin_product(d, 2 * N, false, a, nullptr, b, number_of<T>);
}
template <int N, class T> __device__ __forceinline__ void wgmma(float (&d)[N], const u32 (&a)[4], u64 b, T) {
    emulation::begin_product(d, 2 * N, true, 0, a, b, number_of<T>);
}
#else
#define TEN(tens) \
    "%" tens "0,%" tens "1,%" tens "2,%" tens "3,%" tens "4,%" tens "5,%" tens "6,%" tens "7,%" tens "8,%" tens "9,"
#define OF_32 TEN("") TEN("1") TEN("2") "%30,%31"
#define OF_64 TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") "%60,%61,%62,%63"
#define OF_128                                                                                                           \
    TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") TEN("6") TEN("7") TEN("8") TEN("9") TEN("10") TEN("11")         \
    "%120,%121,%122,%123,%124,%125,%126,%127"
#define EIGHT(is, d, i) \
    is(d[i]), is(d[i + 1]), is(d[i + 2]), is(d[i + 3]), is(d[i + 4]), is(d[i + 5]), is(d[i + 6]), is(d[i + 7])
#define ALL_32(is, d) EIGHT(is, d, 0), EIGHT(is, d, 8), EIGHT(is, d, 16), EIGHT(is, d, 24)
#define ALL_64(is, d) ALL_32(is, d), EIGHT(is, d, 32), EIGHT(is, d, 40), EIGHT(is, d, 48), EIGHT(is, d, 56)
#define ALL_128(is, d)                                                                                                   \
    ALL_64(is, d), EIGHT(is, d, 64), EIGHT(is, d, 72), EIGHT(is, d, 80), EIGHT(is, d, 88), EIGHT(is, d, 96),             \
        EIGHT(is, d, 104), EIGHT(is, d, 112), EIGHT(is, d, 120)
#define BEGINS(columns, type, d) "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" d "}, "
// One, two, ... are what stands behind the registers of d.
#define WAITS(count, one)                                                                                                \
    template <int pending> __device__ __forceinline__ void wgmma_wait(float (&d)[count]) {                               \
        asm volatile("wgmma.wait_group.sync.aligned " one ";" : ALL_##count("+f", d) : "n"(pending) : "memory");         \
    }                                                                                                                    \
    __device__ __forceinline__ void wgmma_fence(float (&d)[count]) {                                                     \
        asm volatile("wgmma.fence.sync.aligned;" : ALL_##count("+f", d)::"memory");                                      \
    }
#define PRODUCT(count, columns, one, two, is, adds, type)                                                                \
    asm volatile("{.reg .pred adds; setp.ne.u32 adds, " adds ", 0;"                                                      \
                 BEGINS(columns, type, OF_##count) one ", " two ", adds, 1, 1, 0, 0;}"                                   \
                 : ALL_##count(is, d) : "l"(a), "l"(b) : "memory")
#define PRODUCTS(count, columns, one, two, three, four, five, Cell, type)                                                \
    __device__ __forceinline__ void wgmma(float (&d)[count], u64 a, u64 b, Cell) { PRODUCT(count, columns, one, two, "+f", "1", type); } \
    __device__ __forceinline__ void wgmma_first(float (&d)[count], u64 a, u64 b, Cell) { PRODUCT(count, columns, one, two, "=f", "0", type); } \
    __device__ __forceinline__ void wgmma(float (&d)[count], const u32 (&a)[4], u64 b, Cell) {                           \
        asm volatile("{.reg .pred adds; setp.ne.u32 adds, 1, 0;"                                                         \
                     BEGINS(columns, type, OF_##count) "{" one ", " two ", " three ", " four "}, " five ", adds, 1, 1, 1;}" \
                     : ALL_##count("+f", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");            \
    }
#define OF_BOTH(count, columns, one, two, three, four, five)                  \
    WAITS(count, one)                                                         \
    PRODUCTS(count, columns, one, two, three, four, five, bf16_bits, "bf16") \
    PRODUCTS(count, columns, one, two, three, four, five, half_bits, "f16")
OF_BOTH(32, 64, "%32", "%33", "%34", "%35", "%36")
OF_BOTH(64, 128, "%64", "%65", "%66", "%67", "%68")
OF_BOTH(128, 256, "%128", "%129", "%130", "%131", "%132")
#endif

// d = a b for a of A_ROWS rows and b of B_ROWS, both of COLUMNS columns in panels of 64, one behind the other in shared memory.
template <int COLUMNS, int A_ROWS, int B_ROWS, int N, class T> __device__ __forceinline__ void multiply_panels(float (&d)[N], u64 a, u64 b, T kind) {
#pragma unroll
    for (int c = 0; c < COLUMNS / 16; c++) {
        const u64 one = a + c / 4 * A_ROWS * ROW + c % 4 * STEP, two = b + c / 4 * B_ROWS * ROW + c % 4 * STEP;
        if (c == 0) {
            wgmma_first(d, one, two, kind);
        } else {
            wgmma(d, one, two, kind);
        }
    }
}
