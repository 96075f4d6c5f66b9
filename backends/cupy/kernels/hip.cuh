// The instructions of cuda.cuh for devices of AMD, compiled by hiprtc or hipcc; it stands in that one's place.
//
// A warp has 32 lanes here as well: it is a half of a wave of 64 lanes (or a wave of 32), and its other half may be
// elsewhere.  So every operation stays within 32 lanes, all of which come to it at one place of the code: lanes of a wave
// share one program counter, and a mask could not be kept.  Matrices are multiplied lane by lane, not by the matrix cores.

#ifndef HOCKET_EMULATED
#pragma clang force_cuda_host_device begin
#undef __launch_bounds__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define __grid_constant__
#endif

constexpr bool SPILLS_SOONER = false;

// ------------------------------------------------------------------------------------------------------------ warps

namespace hip {
template <u32 mask> __device__ __forceinline__ void whole() { static_assert(mask == ALL_LANES, "all 32 lanes or none"); }
template <u32 mask, class T> __device__ __forceinline__ T from_lane(T x, int lane) { return whole<mask>(), __shfl(x, lane, 32); }
template <u32 mask, class T> __device__ __forceinline__ T from_xor(T x, int by) { return whole<mask>(), __shfl_xor(x, by, 32); }
template <u32 mask, class T> __device__ __forceinline__ T from_below(T x, u32 by) { return whole<mask>(), __shfl_up(x, by, 32); }
template <u32 mask> __device__ __forceinline__ u32 votes(bool yes) {  // of this half of the wave
    return whole<mask>(), (u32)(__ballot(yes) >> __lane_id() / 32 * 32);
}
}  // namespace hip
#define __shfl_sync(mask, x, lane) hip::from_lane<mask>(x, lane)
#define __shfl_xor_sync(mask, x, by) hip::from_xor<mask>(x, by)
#define __shfl_up_sync(mask, x, by) hip::from_below<mask>(x, by)
#define __ballot_sync(mask, yes) hip::votes<mask>(yes)
#define __any_sync(mask, yes) (hip::votes<mask>(yes) != 0)
#define __all_sync(mask, yes) (hip::votes<mask>(yes) == ALL_LANES)
// Lanes go on together anyway; what they wrote before is there for all of them.
#define __syncwarp()                                      \
    (__builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront"), \
     __builtin_amdgcn_wave_barrier(),                     \
     __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront"))

// ------------------------------------------------------------------------------------------------------ conversions

__device__ __forceinline__ float half_to_float(u16 bits) {
    _Float16 h;
    __builtin_memcpy(&h, &bits, 2);
    return (float)h;
}
// To the nearest, ties to even.
__device__ __forceinline__ u16 float_to_half(float x) {
    const _Float16 h = (_Float16)x;
    u16 bits;
    __builtin_memcpy(&bits, &h, 2);
    return bits;
}
__device__ __forceinline__ u32 pack_half(float low, float high) {
    return (u32)float_to_half(low) | (u32)float_to_half(high) << 16;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    return (u32)float_to_bf16(low) | (u32)float_to_bf16(high) << 16;
}

// 2 to the power of x.
__device__ __forceinline__ float power_of_2(float x) { return exp2f(x); }

// --------------------------------------------------------------------------------------------------------- products

#ifndef HOCKET_EMULATED
// HIP's own are plain operators, which may be fused.
namespace hip {
template <class T> __device__ __forceinline__ T product(T x, T y) {
#pragma clang fp contract(off)
    return x * y;
}
template <class T> __device__ __forceinline__ T sum(T x, T y) {
#pragma clang fp contract(off)
    return x + y;
}
}  // namespace hip
#define __fmul_rn hip::product<float>
#define __fadd_rn hip::sum<float>
#define __dmul_rn hip::product<double>
#define __dadd_rn hip::sum<double>
#endif

// Four signed bytes of `a` times those of `b`, added to `sum`.
__device__ __forceinline__ i32 dp4a(i32 a, i32 b, i32 sum) {
#ifdef __gfx90a__
    return __builtin_amdgcn_sdot4(a, b, sum, false);
#else
    for (int i = 0; i < 32; i += 8) sum += (i8)(a >> i) * (i8)(b >> i);
    return sum;
#endif
}

// d += a b, as cuda.cuh says where the fragments lie.  A register holds a few numbers that stand side by side in a row of
// `a` or a column of `b`, and `add` adds their products: each lane asks the lanes that have its two rows and columns.
template <class Sum, class Add>
__device__ __forceinline__ void multiply(Sum d[4], const u32 a[4], const u32 b[2], Add add) {
    const int lane = threadIdx.x % 32, row = lane / 4 * 4, column = lane % 4 * 8;
#pragma unroll
    for (int part = 0; part < 2; part++)
#pragma unroll 1  // or it is a thousand instructions
        for (int t = 0; t < 4; t++) {
            const u32 b0 = __shfl(b[part], column + t, 32), b1 = __shfl(b[part], column + 4 + t, 32);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 x = __shfl(a[2 * part + r], row + t, 32);
                d[2 * r] = add(d[2 * r], x, b0);
                d[2 * r + 1] = add(d[2 * r + 1], x, b1);
            }
        }
}
__device__ __forceinline__ void mma_bf16(float d[4], const u32 a[4], const u32 b[2]) {
    multiply(d, a, b, [](float sum, u32 x, u32 y) {
        sum += bf16_to_float((u16)x) * bf16_to_float((u16)y);
        return sum + bf16_to_float((u16)(x >> 16)) * bf16_to_float((u16)(y >> 16));
    });
}
__device__ __forceinline__ void mma_f16(float d[4], const u32 a[4], const u32 b[2]) {
    multiply(d, a, b, [](float sum, u32 x, u32 y) {
        sum += half_to_float((u16)x) * half_to_float((u16)y);
        return sum + half_to_float((u16)(x >> 16)) * half_to_float((u16)(y >> 16));
    });
}
__device__ __forceinline__ void mma_s8(i32 d[4], const u32 a[4], const u32 b[2]) {
    multiply(d, a, b, [](i32 sum, u32 x, u32 y) { return dp4a((i32)x, (i32)y, sum); });
}

// ----------------------------------------------------------------------------------------------------------- memory

// The row of matrix `m` of four that lane 8 m + `row` has the address of.
__device__ __forceinline__ const u16 *row_of(const void *mine, int m, int row) {
    return (const u16 *)__shfl((u64)mine, 8 * m + row, 32);
}
__device__ __forceinline__ void ldmatrix_x4(u32 r[4], const void *row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 4; m++) r[m] = ((const u32 *)row_of(row, m, lane / 4))[lane % 4];
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 r[4], const void *row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const u16 *low = row_of(row, m, lane % 4 * 2), *high = row_of(row, m, lane % 4 * 2 + 1);
        r[m] = (u32)low[lane / 4] | (u32)high[lane / 4] << 16;
    }
}
// Copies are made at once, and a group is there when it is committed.
__device__ __forceinline__ void cp_async_16(void *shared, const void *global) { *(uint4 *)shared = *(const uint4 *)global; }
__device__ __forceinline__ void cp_async_commit() {}
template <int pending> __device__ __forceinline__ void cp_async_wait() {}
template <class T> __device__ __forceinline__ T load_stream(const T *p) { return *p; }
constexpr int LINE = 128;
__device__ __forceinline__ void prefetch(const void *) {}
template <class T> __device__ __forceinline__ void store_stream(T *p, T value) { *p = value; }

// --------------------------------------------------------------------------------------------------------- launches

// A launch begins when the one before it is over.
__device__ __forceinline__ void wait_for_earlier() {}

// ---------------------------------------------------------------------------------------------------------- signals

// Words that other devices read and write while this one runs; they lie in memory that is coherent meanwhile.
__device__ __forceinline__ u64 load_acquire(const u64 *p) {
    return __hip_atomic_load((u64 *)p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ void store_release(u64 *p, u64 x) {
    __hip_atomic_store(p, x, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
// The next number of a word, as cuda.cuh says.
__device__ __forceinline__ u32 take_number(u32 *word) {
#ifdef HOCKET_EMULATED
    return emulation::take_number(word);
#else
    return __hip_atomic_fetch_add(word, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
#endif
}
__device__ __forceinline__ u64 nanoseconds() { return 10 * __builtin_amdgcn_s_memrealtime(); }  // it counts at 100 MHz
__device__ __forceinline__ void give_way() { __builtin_amdgcn_s_sleep(5); }
