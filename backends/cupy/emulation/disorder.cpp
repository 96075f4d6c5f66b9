// Finds conflicting accesses without a happens-before order in the events of launches; race_detector.py explains the
// rules.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "event.h"

namespace emulation {

constexpr int64_t NONE = -1, ALL = INT64_MIN, BY_HOST = -1, STREAMS = 2, WARP = 32;

struct Launched { int64_t device, stream, place, behind; };  // fields of `LoggedLaunch` in access_log.py
struct Memory { uint64_t low, high; int64_t device, is_buffer; };
struct Found { int64_t ran, code, is_store, device; };

// The time of an access. Launches of a queue count from 1 (0: the host before the run). A phase of a block ends with a
// barrier. A part of a thread's phase ends with a release.
struct Stamp { int64_t queue, launch, block, phase, thread, part; };
using Who = std::array<int64_t, 3>;    // a queue; a queue and a block; or a queue, a block and a thread
using Until = std::array<int64_t, 3>;  // a launch; a launch and a phase; or a launch, a phase and a part, as `Who`
using Clock = std::map<Who, Until>;
using Known = std::shared_ptr<const Clock>;

static bool covers(const Clock &known, const Who &who, const Until &until) {
    const auto found = known.find(who);
    return found != known.end() && found->second >= until;
}
// Return whether the access at stamp `s` happens before the one at `mine`, which has the clock `known`.
static bool is_before(const Stamp &s, const Stamp &mine, const Clock &known) {
    if (s.queue == mine.queue && s.launch == mine.launch && s.block == mine.block && (s.thread == mine.thread || s.phase < mine.phase))
        return true;
    return covers(known, {s.queue, ALL, ALL}, {s.launch, 0, 0}) || covers(known, {s.queue, s.block, ALL}, {s.launch, s.phase, 0}) ||
           covers(known, {s.queue, s.block, s.thread}, {s.launch, s.phase, s.part});
}
static void add(Clock &whole, const Who &who, const Until &until) {
    const auto at = whole.emplace(who, until);
    if (!at.second && at.first->second < until) at.first->second = until;
}
static void add(Clock &whole, const Clock &other) {
    for (const auto &[who, until] : other) add(whole, who, until);
}
static void add(Clock &whole, const std::set<Known> &others) {
    for (const Known &other : others) add(whole, *other);
}
static Known joined(const Known &a, const Known &b) {
    if (a == b) return a;
    Clock whole = *a;
    add(whole, *b);
    return std::make_shared<Clock>(std::move(whole));
}

struct Access {
    Stamp stamp;
    int64_t ran;  // index of the launch, or `BY_HOST`
    uint64_t code;
    bool is_store, is_word, is_product;
};
struct Unit {  // a few bytes: the last store, its proxy fence (`shown`), and all loads since the store
    bool is_stored = false, is_shown = false;
    Access store = {};
    Stamp shown = {};
    std::vector<Access> loads;
};
struct Arrivals { Clock so_far, over; };  // joined clocks of threads that arrived: in this phase, in past phases

struct Block {  // a thread block: the clock of all its threads since the last barrier, and clocks of single threads
    int64_t queue, launch, number;
    Known known, earlier;  // `earlier`: the clock that a thread gets when it waits for the launches before
    int64_t phase = 0;
    std::map<int64_t, Known> own = {};
    std::map<int64_t, int64_t> parts = {};
    std::map<int64_t, std::vector<Unit *>> unshown = {};
    std::map<std::pair<Known, Known>, Known> learned = {};  // joined clocks, cached: many threads join the same pair

    const Known &of(int64_t thread) const {
        const auto found = own.find(thread);
        return found == own.end() ? known : found->second;
    }
    Stamp stamp(int64_t thread) const {
        const auto part = parts.find(thread);
        return {queue, launch, number, phase, thread, part == parts.end() ? 0 : part->second};
    }
    // Add the clock of a thread and all its accesses so far to `to`. Later accesses of the thread are in the next part.
    void tell(int64_t thread, Clock &to) {
        add(to, *of(thread));
        add(to, {queue, number, thread}, {launch, phase, parts[thread]++});
    }
    void learn(int64_t thread, const Known &more) {
        Known &both = learned[{of(thread), more}];
        if (!both) both = joined(of(thread), more);
        own[thread] = both;
    }
    // A proxy fence: show the stores of a thread to warpgroup products.
    void show(int64_t thread) {
        for (Unit *unit : unshown[thread])
            if (unit->is_stored && unit->store.stamp.thread == thread) unit->is_shown = true, unit->shown = stamp(thread);
        unshown[thread].clear();
    }
    // A warp barrier of these lanes: all of them get the joined clock.
    void meet(int64_t first, uint64_t lanes) {
        Clock together;
        std::set<Known> before;
        for (int64_t lane = 0; lane < WARP; lane++) {
            if (!(lanes >> lane & 1)) continue;
            before.insert(of(first + lane));
            add(together, {queue, number, first + lane}, {launch, phase, parts[first + lane]++});
        }
        add(together, before);
        const auto shared = std::make_shared<Clock>(std::move(together));
        for (int64_t lane = 0; lane < WARP; lane++)
            if (lanes >> lane & 1) own[first + lane] = shared;
    }
    void barrier() {
        Clock whole = *known;
        std::set<Known> others;
        for (const auto &[thread, clock] : own) others.insert(clock);
        add(whole, others);
        add(whole, {queue, number, ALL}, {launch, phase, 0});
        // The entry of the block covers the entries of its single threads.
        whole.erase(whole.lower_bound({queue, number, ALL + 1}), whole.upper_bound({queue, number, INT64_MAX}));
        known = std::make_shared<Clock>(std::move(whole));
        phase++;
        own.clear(), parts.clear(), learned.clear();
    }
};

using Place = std::array<int64_t, 3>;  // index of a unit of bytes; for shared memory also its launch and block
struct Hash {
    size_t operator()(const Place &p) const { return (p[0] * 0x9e3779b97f4a7c15 ^ p[1] * 0xc2b2ae3d27d4eb4f ^ p[2] * 0x165667b19e3779f9); }
};

struct Run {
    const Launched *launches;
    std::vector<Memory> memory;
    int64_t unit;
    std::set<int64_t> devices = {};
    std::map<int64_t, std::vector<std::pair<int64_t, Known>>> over = {};  // by queue: positions and clocks of ended launches
    std::map<int64_t, int64_t> running = {}, begun = {};                  // by queue
    std::set<int64_t> waited = {};  // launches in which a thread waited for the earlier launches
    std::map<std::pair<int64_t, int64_t>, Block> blocks = {};  // by launch and number
    std::unordered_map<Place, Unit, Hash> units = {};
    struct Released { Known known; int64_t device; bool is_in_device; };
    std::map<std::pair<uint64_t, uint64_t>, Released> released = {};  // by address and value of a word
    std::map<std::array<int64_t, 3>, Arrivals> arrivals = {};  // by launch, block and address
    std::map<std::pair<int64_t, int64_t>, Known> issued = {};  // by launch and bulk copy: the clock at its issue
    std::map<std::array<uint64_t, 4>, std::pair<Access, Access>> pairs = {};

    int64_t queue_of(int64_t number) const { return launches[number].device * STREAMS + launches[number].stream; }

    void begin(int64_t count) {
        for (int64_t n = 0; n < count; n++) devices.insert(launches[n].device);
        for (int64_t device : devices) {
            Clock by_host;
            for (int64_t s = 0; s < STREAMS; s++) by_host[{device * STREAMS + s, ALL, ALL}] = {0, 0, 0};
            const auto known = std::make_shared<Clock>(by_host);
            for (int64_t s = 0; s < STREAMS; s++) over[device * STREAMS + s] = {{NONE, known}};
        }
        std::sort(memory.begin(), memory.end(), [](const Memory &a, const Memory &b) { return a.low < b.low; });
    }
    // End the launch that runs in a queue. Later launches that wait for it get the joined clock of its threads.
    void end(int64_t queue) {
        const auto found = running.find(queue);
        if (found == running.end()) return;
        const int64_t number = found->second;
        running.erase(found);
        Clock whole;
        std::set<Known> clocks;
        for (auto at = blocks.lower_bound({number, INT64_MIN}); at != blocks.end() && at->first.first == number; at = blocks.erase(at)) {
            clocks.insert(at->second.known);
            for (const auto &[thread, clock] : at->second.own) clocks.insert(clock);
        }
        add(whole, clocks);
        add(whole, {queue, ALL, ALL}, {begun[queue], 0, 0});
        whole.erase(whole.lower_bound({queue, ALL + 1, ALL}), whole.upper_bound({queue, INT64_MAX, INT64_MAX}));
        over[queue].push_back({launches[number].place, std::make_shared<Clock>(std::move(whole))});
    }
    // Return the clock that threads of a launch get when they wait for the launches before it.
    Known earlier(int64_t number) {
        const Launched &ran = launches[number];
        Known known = over[queue_of(number)].back().second;
        for (int64_t other = ran.device * STREAMS; other < (ran.device + 1) * STREAMS; other++) {
            if (other == queue_of(number)) continue;
            if (running.count(other) && launches[running[other]].place < ran.behind) end(other);
            const auto &ended = over[other];
            auto last = std::lower_bound(ended.begin(), ended.end(), ran.behind, [](const auto &e, int64_t place) { return e.first < place; });
            known = joined(known, (last - 1)->second);
        }
        return known;
    }
    Block &block(int64_t number, int64_t of) {
        const int64_t queue = queue_of(number);
        const auto now = running.find(queue);
        if (now == running.end() || now->second != number) {
            end(queue);
            running[queue] = number;
            begun[queue]++;
        }
        const auto found = blocks.find({number, of});
        if (found != blocks.end()) return found->second;
        return blocks.insert({{number, of}, Block{queue, begun[queue], of, over[queue].front().second, earlier(number)}}).first->second;
    }
    // Return the device that has a buffer at this place, or `NONE`. Shared memory is in no buffer.
    int64_t owner(const Place &place) const {
        if (place[1] != NONE) return NONE;
        const uint64_t at = place[0] * unit;
        auto m = std::upper_bound(memory.begin(), memory.end(), at, [](uint64_t x, const Memory &m) { return x < m.low; });
        if (m == memory.begin() || !(--m)->is_buffer || at >= m->high) return NONE;
        return m->device;
    }
    void note(const Access &mine, const Access &other) {
        pairs.insert({{mine.code, mine.is_store, other.code, other.is_store}, {mine, other}});
    }
    void compare(const Unit &u, const Access &mine, const Access &other, const Clock &known) {
        if (mine.is_word && other.is_word) return;
        if (mine.is_product ? u.is_shown && is_before(u.shown, mine.stamp, known) : is_before(other.stamp, mine.stamp, known)) return;
        note(mine, other);
    }
    Unit &touch(const Place &place, const Access &mine, const Clock &known) {
        const auto made = units.try_emplace(place);
        Unit &u = made.first->second;
        if (made.second) {
            const int64_t device = owner(place);
            if (device != NONE)  // the host stored it before the run
                u.is_stored = true, u.store = {{device * STREAMS, 0, 0, 0, 0, 0}, BY_HOST, 0, true, false, false};
        }
        if (u.is_stored) compare(u, mine, u.store, known);
        if (mine.is_store) {
            for (const Access &load : u.loads) compare(u, mine, load, known);
            u.store = mine, u.is_stored = true, u.is_shown = false;
            u.loads.clear();
        } else if (u.loads.empty() || memcmp(&u.loads.back(), &mine, sizeof mine)) {
            u.loads.push_back(mine);
        }
        return u;
    }
    template <class Act> void each_unit(const Event &e, int64_t room, int64_t of, Act act) {
        for (int64_t u = e.at / unit; u < int64_t(e.at + e.bytes) / unit; u++) act(Place{u, room, of});
    }
    // Process arrivals and waits at an mbarrier or cluster barrier of block `value`, and bulk copies. Each bulk copy
    // counts as a block of its own with number -1 - `value`. A thread whose clock covers it has waited for its mbarrier.
    void in_cluster(const Event &e, int64_t number, Block &here) {
        const int64_t value = e.value, at = e.at;
        if (e.kind == ARRIVED || e.kind == WAITED || e.kind == OVER) {
            Arrivals &a = arrivals[{number, value, at}];
            if (e.kind == ARRIVED) here.tell(e.thread, a.so_far);
            else if (e.kind == OVER) add(a.over, a.so_far), a.so_far.clear();
            else here.learn(e.thread, std::make_shared<Clock>(a.over));
            return;
        }
        const Stamp stamp = {here.queue, here.launch, -1 - value, 0, 0, 0};
        if (e.kind == ISSUED) {
            Clock told;
            here.tell(e.thread, told);
            issued[{number, value}] = std::make_shared<Clock>(std::move(told));
        } else if (e.kind == COPIED) {
            add(arrivals[{number, here.number, at}].so_far, {stamp.queue, stamp.block, ALL}, {stamp.launch, 0, 0});
        } else {
            const bool is_store = e.kind == COPIED_TO;
            const Access access = {stamp, number, e.code, is_store, false, false};
            const Known known = issued[{number, value}];
            each_unit(e, is_store ? number : NONE, is_store ? here.number : 0, [&](const Place &place) {
                Unit &u = touch(place, access, *known);
                if (is_store) u.is_shown = true, u.shown = stamp;  // bulk copies and products use the same proxy
            });
        }
    }
    void see(const Event &e, int64_t number) {
        Block &here = block(number, e.block);
        if (e.kind == TOGETHER) return e.value ? here.meet(e.thread / WARP * WARP, e.value) : here.barrier();
        if (e.kind == EARLIER) {
            here.learn(e.thread, here.earlier);
            waited.insert(number);
            return;
        }
        if (e.kind == SHOWN) return here.show(e.thread);
        if (e.kind == ACQUIRE) {
            const auto found = released.find({e.at, e.value});
            const bool same_device = found != released.end() && found->second.device == launches[number].device;
            const bool same_system = found != released.end() && !e.is_in_device && !found->second.is_in_device;
            if (same_device || same_system) here.learn(e.thread, found->second.known);
        }
        if (e.kind >= ARRIVED) return in_cluster(e, number, here);
        const bool is_store = e.kind == STORE || e.kind == RELAXED_STORE || e.kind == RELEASE;
        const bool is_word = e.kind == RELAXED_LOAD || e.kind == RELAXED_STORE || e.kind == ACQUIRE || e.kind == RELEASE;
        Access access;
        memset((void *)&access, 0, sizeof access);  // clears the padding too, for memcmp
        access.stamp = here.stamp(e.thread), access.ran = number, access.code = e.code;
        access.is_store = is_store, access.is_word = is_word, access.is_product = e.kind == BY_PRODUCT;
        const Known known = here.of(e.thread);
        each_unit(e, e.is_shared ? number : NONE, e.is_shared ? e.block : 0, [&](const Place &place) {
            Unit &u = touch(place, access, *known);
            if (e.is_shared && is_store) here.unshown[e.thread].push_back(&u);
        });
        if (e.kind == RELEASE) {
            Clock told;
            here.tell(e.thread, told);
            const auto before = released.find({e.at, e.value - 1});
            if (e.adds && before != released.end()) add(told, *before->second.known);
            released[{e.at, e.value}] = {std::make_shared<Clock>(std::move(told)), launches[number].device, e.is_in_device != 0};
        }
    }
    // The host reads all buffers of a device after its streams have ended.
    void read_by_host() {
        std::map<int64_t, Clock> known;
        for (int64_t device : devices)
            for (int64_t s = 0; s < STREAMS; s++) add(known[device], *over[device * STREAMS + s].back().second);
        for (const auto &[place, u] : units) {
            const int64_t device = owner(place);
            if (!devices.count(device) || !u.is_stored || u.store.is_word) continue;
            const int64_t queue = device * STREAMS;
            const Access mine = {{queue, begun[queue] + 1, 0, 0, 0, 0}, BY_HOST, 0, false, false, false};
            if (!is_before(u.store.stamp, mine.stamp, known[device])) note(mine, u.store);
        }
    }
};

}  // namespace emulation

// Write up to `most` racing pairs, as two accesses each, and for each launch whether it waited. Return the pair count.
extern "C" int64_t find_disorder(const emulation::Event *events, const int64_t *numbers, int64_t n, const emulation::Launched *launches,
                                 int64_t n_launches, const emulation::Memory *memory, int64_t n_memory, int64_t unit,
                                 emulation::Found *found, int64_t most, int8_t *waited) {
    using namespace emulation;
    Run run{launches, {memory, memory + n_memory}, unit};
    run.begin(n_launches);
    for (int64_t i = 0; i < n; i++) run.see(events[i], numbers[i]);
    for (const auto &ended : run.over) run.end(ended.first);
    run.read_by_host();
    for (int64_t i = 0; i < n_launches; i++) waited[i] = run.waited.count(i);
    int64_t written = 0;
    for (const auto &pair : run.pairs) {
        if (written == most) break;
        const Access *both[2] = {&pair.second.first, &pair.second.second};
        for (int k = 0; k < 2; k++) {
            const int64_t device = both[k]->stamp.queue / STREAMS;
            found[2 * written + k] = {both[k]->ran, (int64_t)both[k]->code, both[k]->is_store, device};
        }
        written++;
    }
    return run.pairs.size();
}
