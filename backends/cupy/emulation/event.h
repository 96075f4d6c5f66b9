// An event of a thread: order.h writes it, disorder.cpp reads it, and access_log.py has the same fields.
#pragma once

#include <cstdint>

namespace emulation {

enum Kind {
    LOAD, STORE, RELAXED_LOAD, RELAXED_STORE, ACQUIRE, RELEASE, TOGETHER, EARLIER, BY_PRODUCT, SHOWN,
    ARRIVED, OVER, WAITED, ISSUED, COPIED_FROM, COPIED_TO, COPIED,
};
struct Event {
    uint64_t turn, at, code, value;  // `value`: the value of a word; the lanes of a warp barrier, or 0 for a block
                                     // barrier; the block of an mbarrier; or the number of a bulk copy
    uint32_t block, thread, bytes;
    uint8_t kind, is_shared;
    uint8_t is_in_device, adds;  // of a word: whether it orders accesses of one device only; whether 1 was added
};

}  // namespace emulation
