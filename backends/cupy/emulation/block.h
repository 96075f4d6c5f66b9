// Runs the CUDA threads of a block on fibers, and reports faults of the kernel.
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

struct Launch {  // emulated_driver.py has the same fields
    int64_t grid[3], block[3], cluster[3];
    int64_t shared_bytes, words, order, workers;
    const void *arguments;
};
struct Report {
    int64_t status;  // 0: no fault; else FAULT or FAILED
    int64_t block[3], thread[3];
    uint64_t address;  // of the memory fault
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
constexpr unsigned NAMED_BARRIERS = 16, REGISTERS = 65536;  // of a block; of a multiprocessor
constexpr unsigned MAX_FIRST_REGISTERS = 248;               // of a thread at its begin
constexpr uint64_t CANARY = 0x5afe57acc0ffee00;

struct Worker;
struct Copy { void *to; const void *from; int bytes, group; uint64_t code; };
struct Thread {
    dim3 index;
    Worker *worker;
    int warp, lane, stack;
    void *stack_pointer;
    const unsigned *generation;  // the thread waits while `*generation == since`; null if it does not wait
    unsigned since;
    bool done;
    int group;                   // current group of asynchronous copies
    bool has_waited;             // for a group of copies
    bool waits_for_word;
    unsigned arrived_in[NAMED_BARRIERS];  // 1 + the phase of the last arrival at each named barrier
    std::vector<Copy> copies;
};
struct Meeting {  // a warp operation that lanes of a warp do together
    unsigned mask, arrived, generation;
    const char *what;
    const void *place;
    void *brought[32];
};
struct Asynchronous {  // a warpgroup product that a warp has begun
    int columns, group;
    bool adds;
    float *sums[32];
    const unsigned *registers[32];  // the first operand, or null if it is in shared memory
    uint64_t a, b;
    float (*number)(unsigned);
    uint64_t code;
};
struct Warp {
    Meeting meetings[32];  // by the lowest lane of their mask
    std::vector<Asynchronous> products;
    std::map<float *, std::vector<float>> sums;  // accumulators of products, by the registers of lane 0
    int group;
    bool is_fenced;
    uint64_t begun;  // a digest of the operands of all products
    unsigned registers;  // of each thread
};

struct Arrivals {  // an mbarrier, or the barrier of a cluster
    Worker *owner;
    unsigned count, pending, phase;  // arrivals of a phase, missing arrivals, completed phases
    int64_t bytes;                   // missing bytes of bulk copies
    bool is_shown;                   // whether other blocks can use it
};
struct Bulk {  // a bulk copy to shared memory of the blocks in `mask`, which arrives at an mbarrier of each block
    Thread *issuer;
    const void *from;
    size_t to, mbarrier, bytes;  // offsets in shared memory, and a size
    unsigned mask, number;
    uint64_t code;
};
struct Cluster {  // blocks that run at the same time
    Worker *blocks;
    unsigned size, copies;  // number of blocks; number of bulk copies issued in this launch
    std::vector<Bulk> under_way;
    Arrivals all;  // the barrier of the cluster
};

struct Worker {  // a block, with the memory that its operating-system thread reuses for the next block
    Cluster *cluster;
    unsigned rank;  // index of the block in the cluster
    std::map<size_t, Arrivals> mbarriers;  // by their offsets in shared memory
    Arrivals named[NAMED_BARRIERS];
    unsigned free_registers, releases;  // registers that no warp has; how often warps have released some
    dim3 grid, shape, block;
    unsigned threads, live, next, arrived, generation, stacks_used;
    int line;
    uint64_t serial;  // number of the block over all launches
    void (*enter)(const void *, const void *);
    const void *kernel, *arguments;
    void *scheduler;
    bool failed, hasty;  // `hasty`: each warp runs until it waits for others
    Report *report;
    char *stacks, *shared;
    size_t stack_count, shared_bytes;
    std::vector<Thread> all;
    std::vector<Warp> warps;
    std::vector<int> order, idle;
    std::vector<std::pair<char *, size_t>> declared;  // declared shared memory: addresses and sizes
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
// Report a fault and give up the block. Its fibers are abandoned.
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
    if (current == nullptr) {  // no kernel runs: call the earlier handler
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
    // Continue at `leave`, at the top of this fiber's stack; the contents of the stack are no longer needed.
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
    stack_t stack = {};  // handlers must not run on a fiber's stack, which may have overflowed
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
// Run threads that have not begun, one after the other, until one waits. That thread then keeps this stack.
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
        t.group = 0, t.has_waited = t.waits_for_word = false;
        std::fill_n(t.arrived_in, NAMED_BARRIERS, 0);
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
        if (t.generation == &w.releases) return note(FAILED, "deadlock: a warp waits for registers, and %u are free", w.free_registers);
        at_cluster += t.generation == &w.cluster->all.phase;
        for (auto &m : w.mbarriers)
            if (t.generation == &m.second.phase) missing = &m.second, at_mbarrier++;
    }
    if (missing)
        return note(FAILED, "deadlock: %u threads wait at an mbarrier, for %u arrivals and %ld bytes", at_mbarrier, missing->pending, missing->bytes);
    if (at_cluster)
        return note(FAILED, "deadlock: of %u threads %u wait at the barrier of the cluster, %u have ended", w.threads, at_cluster, ended);
    for (const Thread &t : w.all) {
        if (t.done || !t.generation) continue;
        if (t.waits_for_word) return note(FAILED, "deadlock: a thread waits for a word that no running block increments");
    }
    for (unsigned id = 1; id < NAMED_BARRIERS; id++) {
        const Arrivals &a = w.named[id];
        const auto waits = [&](const Thread &t) { return !t.done && t.generation == &a.phase; };
        const unsigned many = std::count_if(w.all.begin(), w.all.end(), waits);
        if (many) return note(FAILED, "deadlock: %u threads wait at named barrier %u, where %u of %u are missing", many, id, a.pending, a.count);
    }
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
static void check_roles(Worker &w) {
    for (unsigned id = 1; id < NAMED_BARRIERS && !w.failed; id++)
        if (w.named[id].pending != w.named[id].count)
            note(FAILED, "ends while %u of %u threads are missing at named barrier %u", w.named[id].pending, w.named[id].count, id);
    for (size_t i = 0; i < w.warps.size() && !w.failed; i++)
        if (w.warps[i].registers != w.warps[i / 4 * 4].registers) note(FAILED, "the warps of a warpgroup have different numbers of registers");
}
static void start(Worker &w, int stack) {
    const size_t apart = stack % 61 * 64;  // different offsets, so that stacks use different cache lines
    void **top = (void **)(w.stacks + (stack + 1) * STACK - apart) - 1;
    *--top = (void *)carry;  // the fiber begins at `carry`, with the stack as after a call
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
// Run a thread until it waits again; return whether it was able to run.
HOCKET_UNSEEN static bool turn(Worker &w, Thread &t) {
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
    for (auto &a : w.named) a = {&w, 0, 0, 0, 0, true};
    const unsigned registers = std::min(REGISTERS / (w.warps.size() * 32) / 8 * 8, (size_t)MAX_FIRST_REGISTERS);
    w.free_registers = w.releases = 0;
    for (auto &warp : w.warps) warp.group = 0, warp.begun = 0, warp.is_fenced = false, warp.registers = registers;
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
// Run each thread of a block until it waits again; return whether any thread was able to run.
static bool take_turns(Worker &w) {
    bool any = false, again = false;
    for (size_t n = 0; n < w.order.size() && !w.failed; n++) {
        if (turn(w, w.all[w.order[n]])) any = again = true;
        if (w.hasty && n % 32 == 31 && std::exchange(again, false)) n -= 32;  // this warp runs again
    }
    return any;
}

}  // namespace emulation
