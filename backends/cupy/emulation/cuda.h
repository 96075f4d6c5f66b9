// The subset of CUDA C++ that hocket's kernels use, for g++ on x86-64. A kernel runs as on a device, and errors that a
// device ignores are reported.
//
// One operating-system thread runs a block, or the blocks of a cluster. Each CUDA thread is a fiber. Threads that never
// wait run one after the other on one stack, so kernels without barriers need no switches. At a wait (a barrier, a warp
// operation), the next thread runs. The caller chooses the order of threads, because threads that share memory without a
// barrier give other results in another order:
//
// - 0: forward.
// - 1: backward; each warp runs as far as possible before the next one.
// - Larger numbers: shuffled, with this number as the seed.
//
// An error ends the launch with a status and a text, and never the process. The errors are:
//
// - a barrier or a warp operation that some threads do not reach, or different operations at the same time
// - a mask without the calling lane, or a read of a lane outside of the mask
// - an access out of bounds or with wrong alignment
// - an integer division by 0
// - asynchronous copies or products in flight at the end
//
// Shared memory begins as NaN. Not modelled are warps in lockstep and features newer than sm_80, except warpgroup
// products (warpgroup.h), clusters (cluster.h) and roles of warps (roles.h). Other threads see stores at once; the access log of order.h serves to
// find kernels that rely on that.
#pragma once
#define HOCKET_EMULATED 1

#include <cmath>
#include <cstring>

#include "warp.h"
#include "warpgroup.h"
#include "wave.h"
#include "words.h"
#include "roles.h"

#define __global__ static
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static const
#define __align__(n) __attribute__((aligned(n)))

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ----------------------------------------------------------------------------------------- CUDA's own names

#define threadIdx (emulation::current->index)
#define blockIdx (emulation::current->worker->block)
#define blockDim (emulation::current->worker->shape)
#define gridDim (emulation::current->worker->grid)
#define __syncthreads() emulation::barrier(__FILE__, __LINE__)
constexpr int warpSize = 32;

// Of all warp operations, only this one orders memory accesses.
static inline void __syncwarp(unsigned mask = ~0u, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (emulation::is_dropped(file, line)) return;
    emulation::meet("__syncwarp", mask, nullptr, [mask](void **) { emulation::note_together(mask); });
}
template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    const int lane = emulation::current->lane;
    return emulation::shuffled(mask, value, (lane & ~(width - 1)) | (from & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32) {
    const int lane = emulation::current->lane, from = lane ^ by;
    return emulation::shuffled(mask, value, (from & ~(width - 1)) == (lane & ~(width - 1)) ? from : lane);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = emulation::current->lane, from = lane - (int)by;
    return emulation::shuffled(mask, value, from < (lane & ~(width - 1)) ? lane : from);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = emulation::current->lane, from = lane + (int)by;
    return emulation::shuffled(mask, value, from > (lane | (width - 1)) ? lane : from);
}
static inline unsigned __ballot_sync(unsigned mask, int yes) { return emulation::vote(mask, yes != 0); }
static inline int __any_sync(unsigned mask, int yes) { return emulation::vote(mask, yes != 0) != 0; }
static inline int __all_sync(unsigned mask, int yes) { return emulation::vote(mask, yes != 0) == mask; }

// Atomic operations on integers only: a sum of floats would depend on the order of threads.
template <class T, class Act> HOCKET_PLACED T changed(T *at, Act act) {
    emulation::Hidden mine;
    emulation::note_word("relaxed.gpu", at, sizeof(T), 0, true, (uint64_t)__builtin_return_address(0));
    return act();
}
template <class T> inline T atomicAdd(T *at, T by) {
    return changed(at, [=] { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); });
}
template <class T> inline T atomicCAS(T *at, T expected, T value) {
    return changed(at, [=] {
        T was = expected;
        __atomic_compare_exchange_n(at, &was, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        return was;
    });
}

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __longlong_as_double(long long u) { double x; memcpy(&x, &u, 8); return x; }
static inline int __float2int_rn(float x) { return x != x ? 0 : (int)lrintf(fminf(fmaxf(x, -2147483648.0f), 2147483520.0f)); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static inline int __float_as_int(float x) { int u; memcpy(&u, &x, 4); return u; }
static inline float __int_as_float(int u) { float x; memcpy(&x, &u, 4); return x; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned found = 0;
    for (int i = 0; i < 4; i++) found |= (unsigned)(both >> 8 * (s >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}
#define HOCKET_MIN_MAX(T)                                            \
    static inline T min(T a, T b) { return b < a ? b : a; }          \
    static inline T max(T a, T b) { return a < b ? b : a; }
HOCKET_MIN_MAX(int)
HOCKET_MIN_MAX(unsigned)
HOCKET_MIN_MAX(long long)
HOCKET_MIN_MAX(unsigned long long)
