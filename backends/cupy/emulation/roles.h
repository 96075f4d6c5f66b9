// Warps of one block with different work, which roles.cuh wraps: named barriers, and registers that warps give to others.
#pragma once

#include "cluster.h"
#include "warp.h"

namespace emulation {

// ------------------------------------------------------------------------------------------------- named barriers

// Arrive at a named barrier. A phase ends when `threads` threads have arrived; all of them state the same number.
static Arrivals &arrive_at_named(unsigned id, unsigned threads) {
    Thread &me = *current;
    Worker &w = *me.worker;
    if (id == 0 || id >= NAMED_BARRIERS) fail("uses the named barrier %u; need 1 to %u, as __syncthreads is 0", id, NAMED_BARRIERS - 1);
    if (threads == 0 || threads % 32 || threads > w.threads)
        fail("%u threads share named barrier %u; need whole warps of a block of %u threads", threads, id, w.threads);
    Arrivals &a = w.named[id];
    if (a.pending == a.count) a.count = a.pending = threads;
    if (a.count != threads) fail("threads share named barrier %u with %u and with %u threads", id, a.count, threads);
    if (std::exchange(me.arrived_in[id], a.phase + 1) == a.phase + 1) fail("arrives twice at named barrier %u in one phase", id);
    note_arrived(a);
    arrive(a, 1, 0);
    return a;
}
static inline void arrive_named(unsigned id, unsigned threads, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (!is_dropped(file, line)) arrive_at_named(id, threads);
}
static inline void sync_named(unsigned id, unsigned threads, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (is_dropped(file, line)) return;
    const unsigned since = current->worker->named[id % NAMED_BARRIERS].phase;
    Arrivals &a = arrive_at_named(id, threads);
    if (a.phase == since) wait(&a.phase, since);
    note_waited(a);
}

// ------------------------------------------------------------------------------------------------------ registers

// Change the registers of each thread of a warp to `count`. A block has as many as at its begin: what one warp releases,
// another may take, and waits for it. All warps of a warpgroup make the same change.
static inline void set_max_registers(unsigned count, bool takes) {
    Worker &w = *current->worker;
    vote(~0u, takes);  // all lanes come here
    Warp &warp = w.warps[current->warp];
    if (current->lane == 0) {
        if (count % 8 || count < 24 || count > 256) fail("sets %u registers; need a multiple of 8 from 24 to 256", count);
        if (takes ? count < warp.registers : count > warp.registers)
            fail("%s %u registers a thread, but has %u", takes ? "takes up to" : "releases down to", count, warp.registers);
        for (const unsigned more = takes ? 32 * (count - warp.registers) : 0; more > w.free_registers;) wait(&w.releases, w.releases);
        w.free_registers += 32 * warp.registers - 32 * count;
        w.releases += !takes;
        warp.registers = count;
    }
    vote(~0u, takes);
}

// ---------------------------------------------------------------------------------------------------------- words

// Wait until a word that other blocks of the cluster increase is at least `target`. Each look is an acquire.
static inline void wait_for_word(const char *order, const unsigned long long *p, unsigned long long target) {
    for (;;) {
        const unsigned long long now = load_word(order, p);
        if (now >= target) return;
        current->waits_for_word = true;
        wait((const unsigned *)p, (unsigned)now);
        current->waits_for_word = false;
    }
}
// Increment a word. A thread that acquires this or a later count also sees what the earlier increments released.
HOCKET_PLACED static void increment_word(const char *order, unsigned long long *p) {
    Hidden mine;
    note_word(order, p, sizeof *p, *p + 1, true, (uint64_t)__builtin_return_address(0), true);
    ++*p;
}

}  // namespace emulation
