// Counts the memory requests of a launch, with their cost on a device.
//
// The n-th accesses of all lanes of a warp at one place of the code form one request, as in lanes that run in lockstep.
// Global memory serves a request in sectors of 32 bytes. Shared memory has 32 banks of 4 bytes and serves one word of
// each bank per wavefront. Devices split requests of 8 or 16 bytes per lane in different ways, so the count of their
// wavefronts is a lower bound.
#pragma once

#include <algorithm>
#include <map>

#include "accesses.h"

namespace emulation {

struct Site {  // all requests of one place in the code; access_counters.py has the same fields
    uint64_t code;  // return address of the access
    uint64_t is_shared, is_store, bytes;  // of a lane
    uint64_t requests, cost, least;       // in sectors, or in wavefronts
};
struct Access { uint64_t at, code; uint32_t bytes; bool is_shared, is_store; };
struct Operand { uint64_t low, high; std::vector<uint32_t> read, written; };  // one bit per byte, one word per sector

static std::vector<Operand> operands;
static std::map<std::pair<uint64_t, bool>, Site> sites;
static std::vector<std::vector<Access>> seen[MOST_BLOCKS];  // accesses of each thread, by block of a cluster
static uint64_t asked;  // sectors of global memory that blocks request, each sector once per block
static int64_t under_way;  // maximum groups of copies in flight while a thread reads shared memory; -1: no copies

// Count the groups of copies in flight. Reads before the first wait do not count, nor do groups without copies.
HOCKET_UNSEEN static void note_under_way(const Thread &t) {
    int64_t groups = 0;
    int last = -1;
    for (auto &c : t.copies)
        if (c.group < t.group) groups += c.group != last, last = c.group;
    if (t.has_waited) under_way = std::max(under_way, groups);
}
HOCKET_UNSEEN static void note_access(const void *p, size_t bytes, bool is_store, uint64_t code) {
    const uint64_t at = (uint64_t)p;
    const bool is_shared = in_shared(at);
    if (!is_shared) {
        Operand *of = nullptr;
        for (auto &o : operands)
            if (at >= o.low && at < o.high) of = &o;
        if (of == nullptr) return;  // registers, or the arguments of the launch
        auto &bits = is_store ? of->written : of->read;
        for (uint64_t b = at; b < std::min(at + bytes, of->high); b++) bits[b / 32 - of->low / 32] |= 1u << b % 32;
    }
    if (is_shared && !is_store) note_under_way(*current);
    const size_t thread = current - current->worker->all.data();
    auto &mine = seen[current->worker->rank];
    if (mine.size() <= thread) mine.resize(thread + 1);
    mine[thread].push_back({at, code, (uint32_t)bytes, is_shared, is_store});
}
HOCKET_UNSEEN static void close_request(const Access *const *all, int lanes) {
    std::vector<uint64_t> units;  // sectors, or words of shared memory
    uint64_t bytes = 0;
    const bool is_shared = all[0]->is_shared;
    const unsigned unit = is_shared ? 4 : 32;
    for (int i = 0; i < lanes; i++) {
        bytes = std::max<uint64_t>(bytes, all[i]->bytes);
        for (uint64_t x = all[i]->at / unit; x <= (all[i]->at + all[i]->bytes - 1) / unit; x++) units.push_back(x);
    }
    std::sort(units.begin(), units.end());
    units.erase(std::unique(units.begin(), units.end()), units.end());
    const uint64_t n = units.size();
    Site &s = sites[{all[0]->code, all[0]->is_store}];
    s.code = all[0]->code, s.is_shared = is_shared, s.is_store = all[0]->is_store, s.bytes = std::max(s.bytes, bytes), s.requests++;
    if (is_shared) {
        uint64_t in_bank[32] = {}, most = 0;
        for (uint64_t x : units) most = std::max(most, ++in_bank[x % 32]);
        s.cost += most, s.least += (n + 31) / 32;
        return;
    }
    uint64_t ends[32], begins[32], used = 0, upto = 0;  // `used`: bytes that any lane requests
    int order[32];
    for (int i = 0; i < lanes; i++) order[i] = i, begins[i] = all[i]->at, ends[i] = all[i]->at + all[i]->bytes;
    std::sort(order, order + lanes, [&](int a, int b) { return begins[a] < begins[b]; });
    for (int i = 0; i < lanes; i++) {
        const uint64_t low = std::max(begins[order[i]], upto), high = std::max(ends[order[i]], upto);
        used += high - low, upto = high;
    }
    s.cost += n, s.least += (used + 31) / 32;
}
static inline void note_word(const char *, const void *, size_t, uint64_t, bool, uint64_t, bool = false) {}
static inline void note_together(unsigned) {}
static inline void note_earlier() {}
static inline void note_arrival(const void *, size_t, uint64_t) {}
static inline void show_to_products() {}
HOCKET_UNSEEN static void read_by_product(const void *p, size_t bytes, uint64_t code, bool again) {
    if (again) note_under_way(*current);  // the product may read until the thread waits for it
    else count(p, bytes, false, code);
}
static inline void note_arrived(const Arrivals &) {}
static inline void note_waited(const Arrivals &) {}
static inline void note_over(const Arrivals &) {}
// A bulk copy reads global memory once, and writes shared memory of each block in its mask at the same offset.
HOCKET_UNSEEN static void note_issue(const Bulk &copy) {
    count(copy.from, copy.bytes, false, copy.code);
    for (unsigned blocks = copy.mask; blocks; blocks &= blocks - 1) count(current->worker->shared + copy.to, copy.bytes, true, copy.code);
}
static inline void note_delivery(const Bulk &, const Worker &, const Arrivals &) {}
static inline bool is_dropped(const char *, int) { return false; }
// Turn the accesses of a block's threads into requests.
static void close_block(const Worker &w) {
    Hidden all_of_it;
    auto &seen = emulation::seen[w.rank];
    const auto by_code = [](const Access &a, const Access &b) {
        return a.code != b.code ? a.code < b.code : a.is_store != b.is_store ? a.is_store < b.is_store : a.is_shared < b.is_shared;
    };
    for (size_t first = 0; first < seen.size(); first += 32) {
        const size_t lanes = std::min<size_t>(32, seen.size() - first);
        size_t next[32] = {};
        for (size_t l = 0; l < lanes; l++) std::stable_sort(seen[first + l].begin(), seen[first + l].end(), by_code);
        for (;;) {
            const Access *least = nullptr, *all[32];
            for (size_t l = 0; l < lanes; l++)
                if (auto &mine = seen[first + l]; next[l] < mine.size() && (!least || by_code(mine[next[l]], *least))) least = &mine[next[l]];
            if (least == nullptr) break;
            size_t start[32], most = 0;
            for (size_t l = 0; l < lanes; l++) {
                auto &mine = seen[first + l];
                start[l] = next[l];
                while (next[l] < mine.size() && !by_code(*least, mine[next[l]])) next[l]++;
                most = std::max(most, next[l] - start[l]);
            }
            for (size_t turn = 0; turn < most; turn++) {
                int n = 0;
                for (size_t l = 0; l < lanes; l++)
                    if (start[l] + turn < next[l]) all[n++] = &seen[first + l][start[l] + turn];
                close_request(all, n);
            }
        }
    }
    std::vector<uint64_t> wanted;
    for (auto &mine : seen)
        for (auto &a : mine)
            if (!a.is_shared)
                for (uint64_t x = a.at / 32; x <= (a.at + a.bytes - 1) / 32; x++) wanted.push_back(x);
    std::sort(wanted.begin(), wanted.end());
    asked += std::unique(wanted.begin(), wanted.end()) - wanted.begin();
    for (auto &mine : seen) mine.clear();
}

}  // namespace emulation

// Clear all counters. `spans` are the address ranges of the operands.
extern "C" HOCKET_UNSEEN void counters_begin(const uint64_t *spans, int64_t n) {
    using namespace emulation;
    operands.clear(), sites.clear(), asked = 0, under_way = -1;
    for (auto &of_block : seen) of_block.clear();
    for (int64_t i = 0; i < n; i++) {
        const uint64_t low = spans[2 * i], high = spans[2 * i + 1], sectors = (high - 1) / 32 - low / 32 + 1;
        operands.push_back({low, high, std::vector<uint32_t>(sectors), std::vector<uint32_t>(sectors)});
    }
    is_hidden = false;
}
// Write the sites to `out`, and six numbers to `moved`: bytes of distinct sectors that were read, bytes of them that were
// requested, the same two numbers for writes, bytes of sectors that are distinct within a block, and the maximum groups of
// copies in flight.
extern "C" HOCKET_UNSEEN int64_t counters_end(emulation::Site *out, int64_t most, int64_t *moved) {
    using namespace emulation;
    is_hidden = true;
    for (auto &o : operands)
        for (int written = 0; written < 2; written++)
            for (uint32_t bits : written ? o.written : o.read) moved[2 * written] += bits ? 32 : 0, moved[2 * written + 1] += __builtin_popcount(bits);
    moved[4] = 32 * asked, moved[5] = under_way;
    int64_t n = 0;
    for (auto &entry : sites)
        if (n < most) out[n++] = entry.second;
    return n;
}
