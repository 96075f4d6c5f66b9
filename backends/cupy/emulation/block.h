// A block: its CUDA threads on fibers, and what is wrong with a kernel as a report.
#pragma once

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include <utility>
#include <vector>

struct dim3 {
    unsigned x, y, z;
};

namespace emulation {

struct Launch {  // as emulated.py fills it in
    int64_t grid[3], block[3], cluster[3];
    int64_t shared_bytes, words, order, workers;
    const void *arguments;
};
struct Report {
    int64_t status;  // 0, or one of the following
    int64_t block[3], thread[3];
    uint64_t address;  // of a fault
    char text[200];
};
enum { FAULT = 1, FAILED = 2 };

extern "C" void hocket_switch(void **save, void *go_on);
asm(R"(
.text
.weak hocket_switch
.hidden hocket_switch
.type hocket_switch,@function
hocket_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  popq %rdx
  jmp *%rdx
.size hocket_switch,.-hocket_switch
)");

constexpr size_t PAGE = 4096, GUARD = 16 << 20, STACK = 64 << 10, BELOW = 1 << 20, MOST_THREADS = 1024, MOST_SHARED = 232448, MOST_BLOCKS = 8;
constexpr uint64_t CANARY = 0x5afe57acc0ffee00;

struct Worker;
struct Copy { void *to; const void *from; int bytes, group; uint64_t code; };
struct Thread {
    dim3 index;
    Worker *worker;
    int warp, lane, stack;
    void *stack_pointer;
    const unsigned *generation;  // waits while this is
    unsigned since;              // equal to that; null if it does not wait
    bool done;
    int group;                   // of copies
    bool has_waited;             // for some
    std::vector<Copy> copies;
};
struct Meeting {  // of lanes of a warp
    unsigned mask, arrived, generation;
    const char *what;
    const void *place;
    void *brought[32];
};
struct Asynchronous {  // a product that a warp has begun
    int columns, group;
    bool adds;
    float *sums[32];
    const unsigned *registers[32];  // of the first operand, or null
    uint64_t a, b;
    float (*number)(unsigned);
    uint64_t code;
};
struct Warp {
    Meeting meetings[32];  // by the lowest lane of the mask
    std::vector<Asynchronous> products;
    std::map<float *, std::vector<float>> sums;  // of registers that products add to, by those of lane 0
    int group;
    bool is_fenced;
    uint64_t begun;  // a digest of all operands
};

struct Arrivals {  // what threads wait for: so many of them, and bytes of copies
    Worker *owner;
    unsigned count, pending, phase;  // phases that are over
    int64_t bytes;
    bool is_shown;  // to other blocks
};
struct Bulk {  // a copy to shared memory of blocks of a cluster, which arrives at an mbarrier of each
    Thread *issuer;
    const void *from;
    size_t to, mbarrier, bytes;  // places in shared memory
    unsigned mask, number;
    uint64_t code;
};
struct Cluster {  // blocks that run at the same time
    Worker *blocks;
    unsigned size, copies;  // so many were issued in this launch
    std::vector<Bulk> under_way;
    Arrivals all;  // threads at the barrier of the cluster
};

struct Worker {  // a block, and what the operating-system thread that runs it keeps for it
    Cluster *cluster;
    unsigned rank;  // in it
    std::map<size_t, Arrivals> mbarriers;  // by their places in shared memory
    dim3 grid, shape, block;
    unsigned threads, live, next, arrived, generation, stacks_used;
    int line;
    uint64_t serial;  // of the block, over all launches
    void (*enter)(const void *, const void *);
    const void *kernel, *arguments;
    void *scheduler;
    bool failed, hasty;  // warps go on until they wait for others
    Report *report;
    char *stacks, *shared;
    size_t stack_count, shared_bytes;
    std::vector<Thread> all;
    std::vector<Warp> warps;
    std::vector<int> order, idle;
    std::vector<std::pair<char *, size_t>> declared;  // shared memory of declarations
};

static thread_local Thread *current = nullptr;  // null while no kernel runs

}  // namespace emulation
#ifndef HOCKET_SEEN
#define HOCKET_SEEN "unseen.h"
#endif
#include HOCKET_SEEN
namespace emulation {

// ---------------------------------------------------------------------------------------------------- errors

static inline void leave(Thread *me) { hocket_switch(&me->stack_pointer, me->worker->scheduler); }

static void note(int status, const char *form, ...) {
    Worker &w = *current->worker;
    Report &r = *w.report;
    r.status = status;
    const dim3 &b = w.block, &t = current->index;
    const unsigned at[6] = {b.x, b.y, b.z, t.x, t.y, t.z};
    for (int i = 0; i < 3; i++) r.block[i] = at[i], r.thread[i] = at[3 + i];
    va_list values;
    va_start(values, form);
    vsnprintf(r.text, sizeof r.text, form, values);
    va_end(values);
    w.failed = true;
}
// Say what is wrong and give up the block; the fibers are left as they are.
template <class... Values> [[noreturn]] static void fail(const char *form, Values... values) {
    note(FAILED, form, values...);
    leave(current);
    __builtin_unreachable();
}

static bool is_near(const char *low, size_t bytes, const char *at) { return low && at >= low - GUARD && at < low + bytes + GUARD; }
static void say_fault(const char *at) {
    const Worker &w = *current->worker;
    if (is_near(w.stacks - BELOW, BELOW, at)) return note(FAILED, "needs more than 64 KiB of local memory");
    if (is_near(w.shared, w.shared_bytes, at)) return note(FAILED, "touches shared memory outside of its %zu bytes", w.shared_bytes);
    for (auto &d : w.declared)
        if (is_near(d.first, d.second, at)) return note(FAILED, "touches shared memory outside of its %zu bytes", d.second);
    note(FAULT, "touches memory that is not its own");
    w.report->address = (uint64_t)at;
}

constexpr int SIGNALS[] = {SIGSEGV, SIGFPE, SIGILL};
static struct sigaction earlier[3];

static void on_signal(int number, siginfo_t *info, void *context) {
    if (current == nullptr) {  // not a kernel: whoever was there before us
        const struct sigaction &e = earlier[number == SIGSEGV ? 0 : number == SIGFPE ? 1 : 2];
        if (e.sa_flags & SA_SIGINFO) return e.sa_sigaction(number, info, context);
        if (e.sa_handler != SIG_DFL && e.sa_handler != SIG_IGN) return e.sa_handler(number);
        signal(number, SIG_DFL);
        return;
    }
    if (number == SIGFPE) note(FAILED, "divides an integer by 0");
    else if (number == SIGILL) note(FAILED, "reads or writes through a misaligned pointer, or an array outside of its bounds");
    else if (info->si_code == SI_KERNEL) note(FAILED, "touches memory through a wild pointer");
    else say_fault((const char *)info->si_addr);
    // Go on at `leave`, from the top of this fiber's stack, of which nothing is needed any more.
    auto &registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    registers[REG_RSP] = (greg_t)(current->worker->stacks + (current->stack + 1) * STACK - 256 - 8);
    registers[REG_RIP] = (greg_t)(void (*)())[] { leave(current); };
}
static void catch_faults() {
    static bool caught = [] {
        struct sigaction mine = {};
        mine.sa_sigaction = on_signal;
        mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &mine, &earlier[i]);
        return true;
    }();
    (void)caught;
    stack_t stack = {};  // handlers must not run on a fiber's stack, which may be what overflowed
    sigaltstack(nullptr, &stack);
    if (stack.ss_flags & SS_DISABLE) {
        stack.ss_size = 64 << 10;
        stack.ss_sp = malloc(stack.ss_size);
        stack.ss_flags = 0;
        sigaltstack(&stack, nullptr);
    }
}

// ---------------------------------------------------------------------------------------------------- blocks

static inline void wait(const unsigned *generation, unsigned since) {
    Thread *me = current;
    me->generation = generation;
    me->since = since;
    leave(me);
}
// Runs threads that have not begun, until one waits: then this stack is that thread's.
static void carry() {
    Worker &w = *current->worker;
    for (;;) {
        if (w.next == w.threads) {
            w.idle.push_back(current->stack);
            leave(current);
        }
        Thread &t = w.all[w.order[w.next++]];
        t.stack = current->stack;
        t.generation = nullptr;
        t.done = false;
        t.group = 0, t.has_waited = false;
        current = &t;
        w.enter(w.kernel, w.arguments);
        if (!t.copies.empty()) fail("ends with copies to shared memory in flight; wait for them");
        if (!w.warps[t.warp].products.empty()) fail("ends with products in flight; wait for them");
        t.done = true;
        w.live--;
    }
}
static bool has_ended(const Worker &w) { return w.live == 0; }
static void say_deadlock(Worker &w) {
    unsigned at_barrier = w.arrived, at_cluster = 0, at_mbarrier = 0, ended = w.threads - w.live;
    const Arrivals *missing = nullptr;
    for (size_t i = w.all.size(); i--;) {
        const Thread &t = w.all[i];
        if (t.done) continue;
        current = &w.all[i];
        at_cluster += t.generation == &w.cluster->all.phase;
        for (auto &m : w.mbarriers)
            if (t.generation == &m.second.phase) missing = &m.second, at_mbarrier++;
    }
    if (missing)
        return note(FAILED, "deadlock: %u threads wait at an mbarrier, for %u arrivals and %ld bytes", at_mbarrier, missing->pending, missing->bytes);
    if (at_cluster)
        return note(FAILED, "deadlock: of %u threads %u wait at the barrier of the cluster, %u have ended", w.threads, at_cluster, ended);
    const char *what = "a barrier";
    for (auto &warp : w.warps)
        for (auto &m : warp.meetings)
            if (m.arrived) what = m.what;
    note(FAILED, "deadlock: of %u threads %u wait at a barrier (line %d), %u in a warp operation (%s), %u have ended", w.threads,
         at_barrier, at_barrier ? w.line : 0, w.live - at_barrier, w.live > at_barrier ? what : "none", ended);
}
static void check_stacks(Worker &w) {
    for (unsigned i = 0; i < w.stacks_used && !w.failed; i++)
        if (*(uint64_t *)(w.stacks + i * STACK) != CANARY) note(FAILED, "needs more than 64 KiB of local memory");
}
static void check_warpgroups(Worker &w) {
    const auto begun = [&](size_t warp) { return warp < w.warps.size() ? w.warps[warp].begun : 0; };
    for (size_t i = 0; i < w.warps.size() && !w.failed; i++)
        if (begun(i) != begun(i / 4 * 4 + (i + 1) % 4)) note(FAILED, "the four warps of a warpgroup begin different products");
}
static void start(Worker &w, int stack) {
    const size_t apart = stack % 61 * 64;  // or all of them would meet in the same lines of the cache
    void **top = (void **)(w.stacks + (stack + 1) * STACK - apart) - 1;
    *--top = (void *)carry;  // begins with the stack as after a call
    top -= 6;
    *(uint64_t *)(w.stacks + stack * STACK) = CANARY;
    Thread nobody = {};
    nobody.worker = &w;
    nobody.stack = stack;
    current = &nobody;
    hocket_switch(&w.scheduler, top);
}
static inline uint64_t random_from(uint64_t &state) {  // SplitMix64
    uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}
static void shuffle(std::vector<int> &order, uint64_t &state) {
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_from(state) % i]);
}
// Let a thread run until it waits again; whether it could.
static bool turn(Worker &w, Thread &t) {
    if (w.failed || t.done || (t.generation && *t.generation == t.since)) return false;
    t.generation = nullptr;
    current = &t;
    hocket_switch(&w.scheduler, t.stack_pointer);
    return true;
}
static void begin_block(Worker &w, int64_t order, uint64_t &random) {
    if (order > 1) shuffle(w.order, random);
    w.live = w.threads;
    w.next = w.arrived = w.generation = w.stacks_used = 0;
    w.hasty = order == 1;
    w.serial++;
    w.idle.clear();
    w.mbarriers.clear();
    for (auto &warp : w.warps) warp.group = 0, warp.begun = 0, warp.is_fenced = false;
    memset(w.shared, 0xff, w.shared_bytes);
}
static void begin_threads(Worker &w) {
    while (w.next < w.threads && !w.failed) {
        if (w.idle.empty()) w.idle.push_back(w.stacks_used++);
        const int stack = w.idle.back();
        w.idle.pop_back();
        start(w, stack);
    }
}
// Let each thread of a block run until it waits again; whether any could.
static bool take_turns(Worker &w) {
    bool any = false, again = false;
    for (size_t n = 0; n < w.order.size() && !w.failed; n++) {
        if (turn(w, w.all[w.order[n]])) any = again = true;
        if (w.hasty && n % 32 == 31 && std::exchange(again, false)) n -= 32;  // this warp goes on
    }
    return any;
}

}  // namespace emulation
