// Stands before every file of kernels.  Types, conversions, and the instructions that C++ has no word for: inline PTX
// on a device, the emulation's version elsewhere.
//
// A kernel takes one struct by value whose fields are all 8 bytes (a pointer, i64 or double):
//     __global__ void name(const __grid_constant__ Args a)
// Shared memory is declared as SHARED(name, float[32][33]), or DYNAMIC_SHARED(name, float), a pointer to as many bytes as
// the launch says.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr u32 ALL_LANES = 0xffffffffu;

template <class T> using Same = T;
#ifdef HOCKET_EMULATED
#define SHARED(name, ...)                                                   \
    static thread_local emulation::Shared<Same<__VA_ARGS__>> name##_memory; \
    auto &name = name##_memory.get()
#define DYNAMIC_SHARED(name, ...) auto *name = (Same<__VA_ARGS__> *)emulation::current->worker->shared
#else
#define INFINITY __int_as_float(0x7f800000)
#define SHARED(name, ...) __shared__ __align__(16) Same<__VA_ARGS__> name
#define DYNAMIC_SHARED(name, ...)                       \
    extern __shared__ __align__(16) u8 hocket_shared[]; \
    auto *name = (Same<__VA_ARGS__> *)hocket_shared
#endif

// ------------------------------------------------------------------------------------------------- conversions

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
__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
// To the nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ u16 float_to_bf16(float x) {
    const u32 u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)(u >> 16 | 0x40);
    return (u16)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
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
template <class T> __device__ __forceinline__ void store_stream(T *p, T value) {
#ifdef HOCKET_EMULATED
    *p = value;
#else
    __stcs(p, value);
#endif
}

// ---------------------------------------------------------------------------------------------------- warps

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int by = 16; by > 0; by >>= 1) x += __shfl_xor_sync(ALL_LANES, x, by);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int by = 16; by > 0; by >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, by));
    return x;
}
// Over all threads of a block of whole warps, at most 1024; every thread gets it.  `room` is shared memory of 32 floats
// that nobody else uses meanwhile.
__device__ __forceinline__ float block_sum(float x, float *room) {
    const u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_sum(x);
    if (warps == 1) return x;
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? room[lane] : 0.0f);
    __syncthreads();
    return x;
}
__device__ __forceinline__ float block_max(float x, float *room) {
    const u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_max(x);
    if (warps == 1) return x;
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = warp_max(lane < warps ? room[lane] : -INFINITY);
    __syncthreads();
    return x;
}

// ---------------------------------------------------------------------------------------------------- faults

// A number that comes from data and is not legal: the first one is kept, the run ends with an error after its last
// launch.  The words are those of `Launches.fault`.
struct Fault {
    u64 *found;  // 1 + which fault it is, or 0; then the number
    i64 which;
};
__device__ __forceinline__ void note_fault(const Fault &f, i64 value) {
    if (atomicCAS(&f.found[0], (u64)0, (u64)(f.which + 1)) == 0) f.found[1] = (u64)value;
}

// --------------------------------------------------------------------------------------------------- strides

// As axes.py gives them: axes from the outermost, and the step of an operand along each.
constexpr int MOST_AXES = 10;
struct Axes {
    i64 rank, size[MOST_AXES];
};
template <class T> struct Walk {
    T *at;
    i64 step[MOST_AXES];
};

// Where element `i` of the walked shape lies in each of N operands; elements are fewer than 2^32.
template <int N> struct Places {
    i64 at[N];
};
template <int N> __device__ __forceinline__ Places<N> places(const Axes &axes, const i64 *const (&steps)[N], u32 i) {
    Places<N> p;
#pragma unroll
    for (int k = 0; k < N; k++) p.at[k] = 0;
    for (int a = (int)axes.rank - 1; a > 0; a--) {
        const u32 size = (u32)axes.size[a], next = i / size, here = i - next * size;
#pragma unroll
        for (int k = 0; k < N; k++) p.at[k] += here * steps[k][a];
        i = next;
    }
#pragma unroll
    for (int k = 0; k < N; k++) p.at[k] += i * steps[k][0];
    return p;
}

// Weights that are kept in 16 bits, told apart by their type.
struct half_bits {
    u16 bits;
};
struct bf16_bits {
    u16 bits;
};
__device__ __forceinline__ float to_float(half_bits x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(bf16_bits x) { return bf16_to_float(x.bits); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(i8 x) { return x; }
__device__ __forceinline__ float to_float(i16 x) { return x; }
__device__ __forceinline__ float to_float(i32 x) { return (float)x; }
__device__ __forceinline__ float to_float(i64 x) { return (float)x; }
__device__ __forceinline__ float logistic(float x) {  // without overflow
    const float e = expf(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}
__device__ __forceinline__ float silu(float x) { return x * logistic(x); }
__device__ __forceinline__ float gelu(float x) { return x * logistic(1.5957691216057308f * (x + 0.044715f * x * x * x)); }
