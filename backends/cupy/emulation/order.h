// Logs accesses to memory that other threads can see, and synchronisations, in an order that all devices share.
// race_detector.py finds races in the log.
//
// `turns` counts the releases of all devices, and each event has the count at its time. A release increases the count
// before another thread can acquire it, so sorting events by this count keeps each release before its acquires.
#pragma once

#include <algorithm>
#include <map>

#include "accesses.h"
#include "event.h"

namespace emulation {

struct Span { uint64_t low, high; };
static thread_local uint64_t *turns;
static thread_local std::vector<Span> spans;  // the memory of devices, by address
static thread_local const char *dropped_file;  // file of the barrier that this launch skips
static thread_local int64_t dropped_line;
static thread_local std::vector<Event> events;
static thread_local std::map<std::pair<const Thread *, const void *>, uint64_t> last_seen;  // by thread and address

HOCKET_UNSEEN static uint32_t number_of(const Worker &w) { return w.block.x + w.grid.x * (w.block.y + w.grid.y * w.block.z); }
HOCKET_UNSEEN static void add(Kind kind, const void *p, size_t bytes, uint64_t code, uint64_t value, bool is_shared, const Worker *of = nullptr) {
    const uint64_t turn = kind == RELEASE ? __atomic_fetch_add(turns, 1, __ATOMIC_SEQ_CST) : __atomic_load_n(turns, __ATOMIC_SEQ_CST);
    const uint32_t block = number_of(of ? *of : *current->worker), thread = of ? 0 : current - current->worker->all.data();
    events.push_back({turn, (uint64_t)p, code, value, block, thread, (uint32_t)bytes, (uint8_t)kind, is_shared, 0, 0});
}
HOCKET_UNSEEN static void note_access(const void *p, size_t bytes, bool is_store, uint64_t code) {
    const uint64_t at = (uint64_t)p;
    const bool is_shared = in_shared(at);
    const auto behind = std::upper_bound(spans.begin(), spans.end(), at, [](uint64_t x, const Span &s) { return x < s.low; });
    if (!is_shared && (behind == spans.begin() || at >= behind[-1].high)) return;  // registers, or emulator memory
    add(is_store ? STORE : LOAD, p, bytes, code, 0, is_shared);
}
// Log a load after it happens, and a store before. Only operations with system scope order accesses of other devices. A
// repeated load of an equal value is not logged again, because threads poll words.
HOCKET_UNSEEN static void note_word(const char *order, const void *p, size_t bytes, uint64_t value, bool is_store, uint64_t code, bool adds = false) {
    const bool is_wide = strstr(order, ".sys") || strstr(order, ".gpu");
    const bool orders = is_wide && strstr(order, is_store ? "release" : "acquire");
    if (!is_store) {
        const std::pair<const Thread *, const void *> key(current, p);
        const auto known = last_seen.find(key);
        if (known != last_seen.end() && known->second == value) return;
        last_seen[key] = value;
    }
    add(is_store ? orders ? RELEASE : RELAXED_STORE : orders ? ACQUIRE : RELAXED_LOAD, p, bytes, code, value, false);
    events.back().is_in_device = !strstr(order, ".sys"), events.back().adds = adds;
}
HOCKET_UNSEEN static void note_together(unsigned lanes) {
    Hidden mine;
    add(TOGETHER, nullptr, 0, 0, lanes, false);
}
// Log that the thread has waited for the launches before.
HOCKET_UNSEEN static void note_earlier() {
    Hidden mine;
    add(EARLIER, nullptr, 0, 0, 0, false);
}
// Log the store of an asynchronous copy at its arrival; `copy_later` logs another one at its issue.
HOCKET_UNSEEN static void note_arrival(const void *p, size_t bytes, uint64_t code) {
    Hidden mine;
    add(STORE, p, bytes, code, 0, true);
}
// Log the loads of a warpgroup product. They happen at any time between its begin and the wait, and are logged at both.
HOCKET_UNSEEN static void read_by_product(const void *p, size_t bytes, uint64_t code, bool) {
    Hidden mine;
    add(BY_PRODUCT, p, bytes, code, 0, true);
}
HOCKET_UNSEEN static void show_to_products() {
    Hidden mine;
    add(SHOWN, nullptr, 0, 0, 0, true);
}
static inline bool is_dropped(const char *file, int line) { return line == dropped_line && strcmp(file, dropped_file) == 0; }
// Log arrivals at an mbarrier or at the barrier of a cluster, and waits. A thread that waits gets the clocks of all threads
// that arrived, and the stores of the bulk copies that the mbarrier counts.
HOCKET_UNSEEN static void note_arrived(const Arrivals &a) {
    Hidden mine;
    add(ARRIVED, &a, 0, 0, number_of(*a.owner), true);
}
HOCKET_UNSEEN static void note_waited(const Arrivals &a) {
    Hidden mine;
    add(WAITED, &a, 0, 0, number_of(*a.owner), true);
}
HOCKET_UNSEEN static void note_over(const Arrivals &a) {
    Hidden mine;
    add(OVER, &a, 0, 0, number_of(*a.owner), true, a.owner);
}
HOCKET_UNSEEN static void note_issue(const Bulk &copy) {
    Hidden mine;
    add(ISSUED, nullptr, 0, copy.code, copy.number, false);
    add(COPIED_FROM, copy.from, copy.bytes, copy.code, copy.number, false);
}
HOCKET_UNSEEN static void note_delivery(const Bulk &copy, const Worker &to, const Arrivals &mbarrier) {
    Hidden mine;
    add(COPIED_TO, to.shared + copy.to, copy.bytes, copy.code, copy.number, true, &to);
    add(COPIED, &mbarrier, 0, copy.code, copy.number, true, &to);
}
static inline void close_block(const Worker &) { last_seen.clear(); }

}  // namespace emulation

extern "C" HOCKET_UNSEEN void order_begin(uint64_t *all_turns, const emulation::Span *memory, int64_t n, const char *file, int64_t line) {
    using namespace emulation;
    turns = all_turns, dropped_file = file, dropped_line = line;
    spans.assign(memory, memory + n);
    events.clear(), last_seen.clear();
    is_hidden = false;
}
extern "C" HOCKET_UNSEEN int64_t order_end() {
    emulation::is_hidden = true;
    return emulation::events.size();
}
// Move the events to the caller.
extern "C" HOCKET_UNSEEN void order_take(emulation::Event *to) {
    using namespace emulation;
    std::copy(events.begin(), events.end(), to);
    std::vector<Event>().swap(events);
}
