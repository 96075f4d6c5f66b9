// The wave operations of hip.cuh, for devices with waves of 64 lanes. The two halves of a wave run as separate warps, and
// each may be ahead of the other. A shuffle across both halves is an error; a vote gets wrong values for the other half.
// Lanes of a wave have one program counter, so all lanes of an operation must be at the same place of the code.
#pragma once

#include "warp.h"

namespace emulation {

#define HOCKET_HERE ({ void *here; asm volatile("lea 0(%%rip), %0" : "=r"(here)); here; })

template <class T> inline __attribute__((always_inline)) T fetched(T value, int from, int width, const void *place) {
    if (width > 32) fail("shuffle over %d lanes, of which the half of a wave has 32", width);
    return shuffled(~0u, value, from, place);
}
static inline unsigned lane_of_wave() { return current->warp % 2 * 32 + current->lane; }
// Return the votes of this half of the wave. The votes of the other half are unknown: return the complement of these.
static inline uint64_t votes_of_wave(bool yes, const void *place) {
    const uint64_t mine = vote(~0u, yes, place), other = (uint32_t)~mine;
    return current->warp % 2 ? mine << 32 | other : other << 32 | mine;
}

}  // namespace emulation

#define HOCKET_LANE_OP inline __attribute__((always_inline))
template <class T> HOCKET_LANE_OP T __shfl(T value, int from, int width = 64) {
    return emulation::fetched(value, (emulation::current->lane & -width) | (from & (width - 1)), width, HOCKET_HERE);
}
template <class T> HOCKET_LANE_OP T __shfl_xor(T value, int by, int width = 64) {
    const int lane = emulation::current->lane, from = lane ^ by;
    return emulation::fetched(value, (from & -width) == (lane & -width) ? from : lane, width, HOCKET_HERE);
}
template <class T> HOCKET_LANE_OP T __shfl_up(T value, unsigned by, int width = 64) {
    const int lane = emulation::current->lane, from = lane - (int)by;
    return emulation::fetched(value, from < (lane & -width) ? lane : from, width, HOCKET_HERE);
}
#define __ballot(yes) emulation::votes_of_wave(yes, HOCKET_HERE)
#define __lane_id() emulation::lane_of_wave()
#define __builtin_amdgcn_wave_barrier() \
    emulation::meet("wave barrier", ~0u, nullptr, [](void **) { emulation::note_together(~0u); }, HOCKET_HERE)
#define __builtin_amdgcn_fence(order, scope) __atomic_thread_fence(order)
#define __HIP_MEMORY_SCOPE_AGENT ".gpu"
#define __HIP_MEMORY_SCOPE_SYSTEM ".sys"
#define __hip_atomic_load(at, order, scope) emulation::load_word((order) == __ATOMIC_ACQUIRE ? "acquire" scope : "relaxed" scope, at)
#define __hip_atomic_store(at, value, order, scope) \
    emulation::store_word((order) == __ATOMIC_RELEASE ? "release" scope : "relaxed" scope, at, value)
#define __builtin_amdgcn_s_memrealtime() (emulation::nanoseconds() / 10)
#define __builtin_amdgcn_s_sleep(times) emulation::give_way()
