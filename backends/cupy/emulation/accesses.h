// Calls `note_access` for every load and store of a kernel. g++ inserts the calls (-fsanitize=kernel-address with calls,
// which needs no library). The header that includes this one, counters.h or order.h, defines `note_access`.
#pragma once

#define HOCKET_UNSEEN __attribute__((no_sanitize("kernel-address"), noinline))
#define HOCKET_PLACED __attribute__((noinline))  // a call returns to the line that made the access

namespace emulation {

// Volatile, because g++ does not know that loads and stores call functions that read it.
static thread_local volatile bool is_hidden = true;
struct Hidden {  // hides the accesses of the emulator itself during its lifetime
    bool was = is_hidden;
    Hidden() { is_hidden = true; }
    ~Hidden() { is_hidden = was; }
};
static void note_access(const void *p, size_t bytes, bool is_store, uint64_t code);

// Return whether an address is local to a thread: on its stack, which a device has in registers. Most accesses are.
HOCKET_UNSEEN static inline bool is_local(uint64_t at) {
    const Worker &w = *current->worker;
    return at - (uint64_t)w.stacks < w.stack_count * STACK;
}
HOCKET_UNSEEN static bool in_shared(uint64_t at) {
    const Worker &w = *current->worker;
    if (at - (uint64_t)w.shared < w.shared_bytes) return true;
    const std::pair<char *, size_t> *d = w.declared.data();
    for (size_t n = w.declared.size(); n--; d++)
        if (at - (uint64_t)d->first < d->second) return true;
    return false;
}
HOCKET_UNSEEN static void count(const void *p, size_t bytes, bool is_store, uint64_t code) {
    if (is_hidden || current == nullptr || is_local((uint64_t)p)) return;
    is_hidden = true;  // `note_access` uses library templates, and their accesses call this function too
    note_access(p, bytes, is_store, code);
    is_hidden = false;
}

}  // namespace emulation

#define HOCKET_COUNT(n)                                                                                                         \
    extern "C" HOCKET_UNSEEN void __asan_load##n##_noabort(const void *p) {                                                     \
        emulation::count(p, n, false, (uint64_t)__builtin_return_address(0));                                                   \
    }                                                                                                                           \
    extern "C" HOCKET_UNSEEN void __asan_store##n##_noabort(const void *p) {                                                    \
        emulation::count(p, n, true, (uint64_t)__builtin_return_address(0));                                                    \
    }
HOCKET_COUNT(1)
HOCKET_COUNT(2)
HOCKET_COUNT(4)
HOCKET_COUNT(8)
HOCKET_COUNT(16)
extern "C" HOCKET_UNSEEN void __asan_loadN_noabort(const void *p, size_t n) {
    emulation::count(p, n, false, (uint64_t)__builtin_return_address(0));
}
extern "C" HOCKET_UNSEEN void __asan_storeN_noabort(const void *p, size_t n) {
    emulation::count(p, n, true, (uint64_t)__builtin_return_address(0));
}
extern "C" HOCKET_UNSEEN void __asan_handle_no_return() {}
extern "C" HOCKET_UNSEEN void __asan_before_dynamic_init(const char *) {}
extern "C" HOCKET_UNSEEN void __asan_after_dynamic_init() {}
