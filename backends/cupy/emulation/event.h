// What a thread did, as order.h notes it and disorder.cpp reads it; ordered.py has the same fields.
#pragma once

#include <cstdint>

namespace emulation {

enum Kind {
    LOAD, STORE, RELAXED_LOAD, RELAXED_STORE, ACQUIRE, RELEASE, TOGETHER, EARLIER, BY_PRODUCT, SHOWN,
    ARRIVED, OVER, WAITED, ISSUED, COPIED_FROM, COPIED_TO, COPIED,
};
struct Event {
    uint64_t turn, at, code, value;  // of a word: what it is; together: the lanes of a warp, or 0 for the whole block; of
                                     // arrivals: the block that they are of; of a copy in bulk: its number
    uint32_t block, thread, bytes;
    uint8_t kind, is_shared, unused[2];
};

}  // namespace emulation
