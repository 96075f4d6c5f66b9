// Words that several blocks or devices read and write while they run.
#pragma once

#include "block.h"

namespace emulation {

// A kernel that waits for another device, which runs on another thread of the operating system.
static inline void give_way() { sched_yield(); }
static inline unsigned long long nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
// Words that several threads see meanwhile; the order is PTX's, such as "acquire.sys".
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

// A word that blocks of one device count on: who gets a number has acquired what those before released, and passes it on.
// All of these blocks run on one thread of the operating system.
template <class T> HOCKET_PLACED T take_number(T *p) {
    Hidden mine;
    const uint64_t code = (uint64_t)__builtin_return_address(0);
    const T number = *p;
    note_word("acquire.sys", p, sizeof *p, number, false, code);
    note_word("release.sys", p, sizeof *p, number + 1, true, code);
    *p = number + 1;
    return number;
}

}  // namespace emulation
