// Stands before every file of kernels, and behind it the instructions of what they are compiled for, cuda.cuh or hip.cuh,
// then prelude.cuh.
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
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define SHARED(name, ...) __shared__ __align__(16) Same<__VA_ARGS__> name
#define DYNAMIC_SHARED(name, ...)                       \
    extern __shared__ __align__(16) u8 hocket_shared[]; \
    auto *name = (Same<__VA_ARGS__> *)hocket_shared
#endif

// Bits of bfloat16.
__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
// To the nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ u16 float_to_bf16(float x) {
    const u32 u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)(u >> 16 | 0x40);
    return (u16)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
