// Words for synchronisation, which several blocks or devices read and write while they run.
#pragma once

#include "block.h"

namespace emulation {

// Yield while a kernel waits for another device, which runs on another operating-system thread.
static inline void give_way() { sched_yield(); }
static inline unsigned long long nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
// Load or store a word with a memory order and scope in PTX syntax, such as "acquire.sys".
template <class T> HOCKET_PLACED T load_word(const char *order, const T *p) {
    Hidden mine;
    const T x = __atomic_load_n(p, __ATOMIC_ACQUIRE);
    note_word(order, p, sizeof x, x, false, (uint64_t)__builtin_return_address(0));
    return x;
}
template <class T> HOCKET_PLACED void store_word(const char *order, T *p, T x) {
    Hidden mine;
    note_word(order, p, sizeof x, x, true, (uint64_t)__builtin_return_address(0));
    __atomic_store_n(p, x, __ATOMIC_RELEASE);
}

// Increment a counter of the blocks of one device and return its old value, with acquire and release order. Blocks of a
// large launch run on several operating-system threads.
template <class T> HOCKET_PLACED T take_number(T *p) {
    Hidden mine;
    const uint64_t code = (uint64_t)__builtin_return_address(0);
    const T number = __atomic_fetch_add(p, (T)1, __ATOMIC_ACQ_REL);
    note_word("acquire.sys", p, sizeof *p, number, false, code);
    note_word("release.sys", p, sizeof *p, number + 1, true, code);
    return number;
}

}  // namespace emulation
