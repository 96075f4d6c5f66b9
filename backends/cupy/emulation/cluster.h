// Clusters: blocks that run at the same time, and the instructions that cluster.cuh wraps: the cluster barrier, mbarriers,
// and bulk copies to shared memory of several blocks.
//
// A bulk copy is made when no thread can continue without it, so that a thread that does not wait reads NaN or old values.
// For hasty warps it is made at once, so that a thread that still reads the old values gets wrong ones.
#pragma once

#include "block.h"

namespace emulation {

// ------------------------------------------------------------------------------------------------------- arrivals

// Subtract arrivals and bytes from the missing ones, and complete the phase at zero. Return an error text or null.
static const char *arrive(Arrivals &a, unsigned arrivals, int64_t bytes) {
    if (arrivals > a.pending) return "arrives where nobody is missing";
    a.pending -= arrivals, a.bytes -= bytes;
    if (a.pending) return nullptr;
    if (a.bytes < 0) return "copies more bytes than an mbarrier expects";
    if (a.bytes == 0) a.pending = a.count, a.phase++, note_over(a);
    return nullptr;
}
static size_t place_of(const void *shared, size_t bytes, size_t alignment) {
    const Worker &w = *current->worker;
    const size_t place = (const char *)shared - w.shared;
    if (place >= w.shared_bytes || bytes > w.shared_bytes - place) fail("takes something for shared memory that the launch sizes");
    if ((uintptr_t)shared % alignment) fail("takes shared memory for something that is aligned to %zu bytes", alignment);
    return place;
}
static Arrivals &mbarrier_at(const void *mbarrier, unsigned rank) {
    Cluster &c = *current->worker->cluster;
    if (rank >= c.size) fail("asks for block %u of a cluster of %u", rank, c.size);
    Worker &w = c.blocks[rank];
    const auto found = w.mbarriers.find(place_of(mbarrier, 8, 8));
    if (has_ended(w)) fail("uses an mbarrier of a block that has ended");
    if (found == w.mbarriers.end() || !(found->second.is_shown || rank == current->worker->rank)) fail("uses an mbarrier that is not ready");
    return found->second;
}
static inline void init_mbarrier(const void *mbarrier, unsigned count) {
    Hidden mine;
    Worker &w = *current->worker;
    if (!w.mbarriers.insert({place_of(mbarrier, 8, 8), {&w, count, count, 0, 0, false}}).second) fail("begins an mbarrier twice");
}
static inline void show_mbarriers() {
    Hidden mine;
    for (auto &m : current->worker->mbarriers) m.second.is_shown = true;
}
static inline void arrive_at(const void *mbarrier, unsigned rank, unsigned bytes = 0) {
    Hidden mine;
    Arrivals &a = mbarrier_at(mbarrier, rank);
    note_arrived(a);
    if (const char *why = arrive(a, 1, -(int64_t)bytes)) fail("%s", why);
}
static inline void wait_for_phase(const void *mbarrier, unsigned parity) {
    Arrivals &a = mbarrier_at(mbarrier, current->worker->rank);
    if ((a.phase & 1) == parity) wait(&a.phase, a.phase);
    note_waited(a);
}
static inline void sync_cluster() {
    Arrivals &a = current->worker->cluster->all;
    const unsigned since = a.phase;
    note_arrived(a);
    arrive(a, 1, 0);
    if (a.phase == since) wait(&a.phase, since);
    note_waited(a);
}

// --------------------------------------------------------------------------------------------------------- copies

// Make a bulk copy. Return an error text or null.
static const char *deliver(Cluster &c, const Bulk &copy) {
    Hidden mine;
    for (unsigned rank = 0; rank < c.size; rank++) {
        if (!(copy.mask >> rank & 1)) continue;
        Worker &w = c.blocks[rank];
        const auto mbarrier = w.mbarriers.find(copy.mbarrier);
        if (has_ended(w)) return "copies to shared memory of a block that has ended";
        if (mbarrier == w.mbarriers.end() || !mbarrier->second.is_shown) return "copies to a block whose mbarrier is not ready";
        memcpy(w.shared + copy.to, copy.from, copy.bytes);
        note_delivery(copy, w, mbarrier->second);
        if (const char *why = arrive(mbarrier->second, 0, copy.bytes)) return why;
    }
    return nullptr;
}
// Make one of the pending bulk copies if `due`: the last issued one if `random` is 0, else any. Return whether one was made.
static bool deliver_any(Cluster &c, bool due, uint64_t random) {
    if (!due || c.under_way.empty()) return false;
    const auto which = c.under_way.end() - 1 - random % c.under_way.size();
    const Bulk copy = *which;
    c.under_way.erase(which);
    current = copy.issuer;
    if (const char *why = deliver(c, copy)) note(FAILED, "%s", why);
    return true;
}
HOCKET_PLACED static void copy_to_blocks(void *to, const void *from, unsigned bytes, const void *mbarrier, unsigned mask) {
    Worker &w = *current->worker;
    Cluster &c = *w.cluster;
    if (bytes == 0 || bytes % 16 || (uintptr_t)from % 16) fail("copies %u bytes in bulk, which are not whole and aligned pieces of 16", bytes);
    if (mask == 0 || mask >> c.size) fail("copies to the blocks %x of a cluster of %u", mask, c.size);
    const volatile char *const ends[] = {(const char *)from, (const char *)from + bytes - 1};
    const size_t place = place_of(to, bytes, 16);
    const Bulk copy{current, from, place, place_of(mbarrier, 8, 8), bytes, mask, c.copies++, (uint64_t)__builtin_return_address(0)};
    note_issue(copy);
    {
        Hidden mine;
        for (auto end : ends) (void)*end;  // faults here, if at all
        if (!w.hasty) return c.under_way.push_back(copy);
    }
    if (const char *why = deliver(c, copy)) fail("%s", why);
}

// ------------------------------------------------------------------------------------------------------------ turns

// Run a block for at most `turns_left` turns of its threads, or until all wait. Return whether any thread was able to run.
static bool go_on(Worker &w, uint64_t turns_left) {
    bool any = false;
    while (!w.failed && !has_ended(w) && turns_left-- && take_turns(w)) any = true;
    return any;
}
static void run_cluster(Cluster &c, int64_t order) {
    const dim3 &at = c.blocks->block;
    uint64_t random = order * 1000003 + at.x + 7919 * at.y + 104729 * at.z;
    c.all = {c.blocks, 0, 0, 0, 0, true};
    c.under_way.clear();
    std::vector<int> ranks(c.size);
    for (unsigned i = 0; i < c.size; i++) {
        ranks[i] = order == 1 ? c.size - 1 - i : i;
        begin_block(c.blocks[i], order, random);
        c.all.count = c.all.pending += c.blocks[i].threads;
    }
    const auto any_block = [&](auto is) { return std::any_of(c.blocks, c.blocks + c.size, is); };
    const auto failed = [&] { return any_block([](const Worker &w) { return w.failed; }); };
    for (int i : ranks) begin_threads(c.blocks[i]);
    while (!failed() && any_block([](const Worker &w) { return !has_ended(w); })) {
        bool any = false;
        if (order > 1 && c.size > 1) shuffle(ranks, random);
        for (int i : ranks) {
            Worker &w = c.blocks[i];
            if (order > 1) shuffle(w.order, random);
            any |= go_on(w, w.hasty ? ~0ull : order == 0 || c.size == 1 ? 1 : 1 + random_from(random) % 3);
            if (failed()) return;
        }
        const bool is_early = order > 1 && random_from(random) % 4 == 0;
        if (deliver_any(c, is_early || !any, order > 1 ? random_from(random) : 0) || any) continue;
        for (int i : ranks)
            if (!has_ended(c.blocks[i])) return say_deadlock(c.blocks[i]);
    }
    if (!failed() && !c.under_way.empty()) {
        current = c.under_way[0].issuer;
        note(FAILED, "ends with copies to shared memory in flight; wait for them");
    }
    for (unsigned i = 0; i < c.size && !failed(); i++) {
        check_stacks(c.blocks[i]);
        check_warpgroups(c.blocks[i]);
        check_roles(c.blocks[i]);
        close_block(c.blocks[i]);
    }
}

}  // namespace emulation
