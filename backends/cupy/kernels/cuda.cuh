// The instructions that C++ has no word for: inline PTX on a device of CUDA, the emulation's version elsewhere.  hip.cuh has
// the same functions for devices of AMD; no other file has inline assembly, or asks what it is compiled for.

// Whether kernels that fill their registers spill some where they do not on others: they ask for fewer blocks then.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool SPILLS_SOONER = true;
#else
constexpr bool SPILLS_SOONER = false;
#endif

// ----------------------------------------------------------------------------------------------------- conversions

__device__ __forceinline__ float half_to_float(u16 bits) {
#ifdef HOCKET_EMULATED
    _Float16 h;
    memcpy(&h, &bits, 2);
    return (float)h;
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#endif
}
// To the nearest, ties to even.
__device__ __forceinline__ u16 float_to_half(float x) {
    u16 bits;
#ifdef HOCKET_EMULATED
    const _Float16 h = (_Float16)x;
    memcpy(&bits, &h, 2);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
    return bits;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
#ifdef HOCKET_EMULATED
    return (u32)float_to_bf16(low) | (u32)float_to_bf16(high) << 16;
#else
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}
__device__ __forceinline__ u32 pack_half(float low, float high) {
#ifdef HOCKET_EMULATED
    return (u32)float_to_half(low) | (u32)float_to_half(high) << 16;
#else
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}

// 2 to the power of x, off by less than 2^-21 of it; 0 where that is below the least normal number.
__device__ __forceinline__ float power_of_2(float x) {
#ifdef HOCKET_EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// ------------------------------------------------------------------------------------------------- products

// Four signed bytes of `a` times those of `b`, added to `sum`.
__device__ __forceinline__ i32 dp4a(i32 a, i32 b, i32 sum) {
#ifdef HOCKET_EMULATED
    for (int i = 0; i < 32; i += 8) sum += (i8)(a >> i) * (i8)(b >> i);
    return sum;
#else
    return __dp4a(a, b, sum);
#endif
}
// d += a b for a of 16 x 16 and b of 16 x 8 (mma.m16n8k16): with g = lane / 4 and t = lane % 4, a[r] holds the pair of
// columns 2t + 8 (r / 2) of row g + 8 (r % 2), b[r] the pair of rows 2t + 8 r of column g, d[r] row g + 8 (r / 2) and
// column 2t + r % 2.
__device__ __forceinline__ void mma_bf16(float d[4], const u32 a[4], const u32 b[2]) {
#ifdef HOCKET_EMULATED
    emulation::multiply_16_8_16(d, a, b, [](u32 bits) { return bf16_to_float((u16)bits); });
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
__device__ __forceinline__ void mma_f16(float d[4], const u32 a[4], const u32 b[2]) {
#ifdef HOCKET_EMULATED
    emulation::multiply_16_8_16(d, a, b, [](u32 bits) { return half_to_float((u16)bits); });
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
// d += a b for signed bytes, a of 16 x 32 and b of 32 x 8 (mma.m16n8k32): a[r] holds four columns from 4t + 16 (r / 2)
// of row g + 8 (r % 2), b[r] four rows from 4t + 16 r of column g, d as above.
__device__ __forceinline__ void mma_s8(i32 d[4], const u32 a[4], const u32 b[2]) {
#ifdef HOCKET_EMULATED
    emulation::multiply_16_8_32(d, a, b);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// --------------------------------------------------------------------------------------------------- memory

// Four 8 x 8 matrices of 16-bit numbers from shared memory: lane l gives the address of row l % 8 of matrix l / 8, and
// gets of each matrix the pair of columns 2 (l % 4) of row l / 4 (transposed: of rows, of column l / 4).
__device__ __forceinline__ void ldmatrix_x4(u32 r[4], const void *row) {
#ifdef HOCKET_EMULATED
    emulation::load_matrices(r, row, false);
#else
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
#endif
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 r[4], const void *row) {
#ifdef HOCKET_EMULATED
    emulation::load_matrices(r, row, true);
#else
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
#endif
}
// 16 bytes from global to shared memory, both aligned to 16, that arrive some time before the matching wait ends; other
// threads see them after a barrier behind it.
__device__ __forceinline__ void cp_async_16(void *shared, const void *global) {
#ifdef HOCKET_EMULATED
    emulation::copy_later(shared, global, 16);
#else
    const u32 at = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(global) : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#ifdef HOCKET_EMULATED
    emulation::current->group++;
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until all but the last `pending` groups are there.
template <int pending> __device__ __forceinline__ void cp_async_wait() {
#ifdef HOCKET_EMULATED
    emulation::wait_for_copies(pending);
#else
    asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
#endif
}
// What is read or written once and should not push anything else out of the cache.
template <class T> __device__ __forceinline__ T load_stream(const T *p) {
#ifdef HOCKET_EMULATED
    return *p;
#else
    return __ldcs(p);
#endif
}
// Into the second cache, what will be read soon: the line of so many bytes that holds `p`.
constexpr int LINE = 128;
__device__ __forceinline__ void prefetch(const void *p) {
#ifdef HOCKET_EMULATED
    emulation::check_reach(p);
#else
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}
template <class T> __device__ __forceinline__ void store_stream(T *p, T value) {
#ifdef HOCKET_EMULATED
    *p = value;
#else
    __stcs(p, value);
#endif
}

// -------------------------------------------------------------------------------------------------------- launches

// Until the launches before this one are over and what they wrote is there.  From sm_90 on a launch may begin while the one
// before it runs (programmatic dependent launch): each kernel waits so at its beginning, or once it has asked for weights,
// which no kernel writes.  The next launch may begin once all blocks are behind this.
__device__ __forceinline__ void wait_for_earlier() {
#ifdef HOCKET_EMULATED
    emulation::note_earlier();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --------------------------------------------------------------------------------------------------------- signals

// Words that other devices read and write while this one runs.  A release of the scope of the system is a fence as well.
#ifdef HOCKET_EMULATED
#define LOAD_WORD(order, x, p) x = emulation::load_word(order, p)
#define STORE_WORD(order, p, x) emulation::store_word(order, p, x)
#else
#define LOAD_WORD(order, x, p) asm volatile("ld." order ".global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory")
#define STORE_WORD(order, p, x) asm volatile("st." order ".global.u64 [%0], %1;" :: "l"(p), "l"(x) : "memory")
#endif
__device__ __forceinline__ u64 load_acquire(const u64 *p) {
    u64 x;
    LOAD_WORD("acquire.sys", x, p);
    return x;
}
__device__ __forceinline__ void store_release(u64 *p, u64 x) { STORE_WORD("release.sys", p, x); }
// The next number of a word: 0, 1, ...  Blocks learn by it which of them comes last; the word is 0 before and after a
// launch.  A block sees what the blocks with smaller numbers have written until they took theirs.
__device__ __forceinline__ u32 take_number(u32 *word) {
#ifdef HOCKET_EMULATED
    return emulation::take_number(word);
#else
    u32 number;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(number) : "l"(word) : "memory");
    return number;
#endif
}
__device__ __forceinline__ u64 nanoseconds() {
#ifdef HOCKET_EMULATED
    return emulation::nanoseconds();
#else
    u64 x;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x));
    return x;
#endif
}
__device__ __forceinline__ void give_way() {
#ifdef HOCKET_EMULATED
    emulation::give_way();
#else
    __nanosleep(200);
#endif
}
