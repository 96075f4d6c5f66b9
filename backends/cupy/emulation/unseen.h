// Hooks that do nothing, for builds without access counters and without an access log.
#pragma once

#define HOCKET_PLACED
#define HOCKET_UNSEEN

namespace emulation {

struct Hidden { Hidden() {} };
static inline void count(const void *, size_t, bool, uint64_t) {}
static inline void note_word(const char *, const void *, size_t, uint64_t, bool, uint64_t, bool = false) {}
static inline void note_together(unsigned) {}
static inline void note_earlier() {}
static inline void note_arrival(const void *, size_t, uint64_t) {}
static inline void read_by_product(const void *, size_t, uint64_t, bool) {}
static inline void show_to_products() {}
static inline bool is_dropped(const char *, int) { return false; }
static inline void note_arrived(const Arrivals &) {}
static inline void note_waited(const Arrivals &) {}
static inline void note_over(const Arrivals &) {}
static inline void note_issue(const Bulk &) {}
static inline void note_delivery(const Bulk &, const Worker &, const Arrivals &) {}
static inline void close_block(const Worker &) {}

}  // namespace emulation
