// The CUDA C++ that hocket's kernels use, for g++ on x86-64: a kernel runs as it would on a device, and what a device
// lets pass is an error here.
//
// One operating-system thread runs a block.  Each of its CUDA threads is a fiber, but for as long as threads never wait
// they run one after another on one stack, so that kernels without barriers cost no switch.  A wait (a barrier, a warp
// operation) gives the turn to the next thread; the order of turns is chosen by the caller (0 forward, 1 backward and
// each warp as far as it gets before the next, more: shuffled from that seed), since threads that share memory without a
// barrier give other results in another order.
//
// Errors end the launch with a status and a text, and never the process: barriers and warp operations that not all come
// to, different ones that meet, masks without the caller, lanes read outside of a mask, memory that is nobody's,
// misaligned vectors, division of integers by 0, copies in flight at the end.  Shared memory begins as NaN.
//
// Not modelled: warps in lockstep, the order in which other threads see stores, anything newer than sm_80.
#pragma once
#define HOCKET_EMULATED 1

#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <utility>
#include <vector>

#define __global__ static
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static const
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
    unsigned x, y, z;
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ------------------------------------------------------------------------------------------------ one launch

namespace emulation {

struct Launch {  // as emulated.py fills it in
    int64_t grid[3], block[3];
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

constexpr size_t PAGE = 4096, STACK = 64 << 10, BELOW = 1 << 20, MOST_THREADS = 1024, MOST_SHARED = 232448;
constexpr uint64_t CANARY = 0x5afe57acc0ffee00;

struct Worker;
struct Copy { void *to; const void *from; int bytes, group; };
struct Thread {
    dim3 index;
    Worker *worker;
    int warp, lane, stack;
    void *stack_pointer;
    const unsigned *generation;  // waits while this is
    unsigned since;              // equal to that; null if it does not wait
    bool done;
    int group;                   // of copies
    std::vector<Copy> copies;
};
struct Meeting {  // of lanes of a warp
    unsigned mask, arrived, generation;
    const char *what;
    void *brought[32];
};
struct Warp { Meeting meetings[32]; };  // by the lowest lane of the mask

struct Worker {  // one operating-system thread, and the block it runs
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

static bool is_near(const char *low, size_t bytes, const char *at) { return low && at >= low - PAGE && at < low + bytes + PAGE; }
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
        t.group = 0;
        current = &t;
        w.enter(w.kernel, w.arguments);
        if (!t.copies.empty()) fail("ends with copies to shared memory in flight; wait for them");
        t.done = true;
        w.live--;
    }
}
static void say_deadlock(Worker &w) {
    unsigned at_barrier = w.arrived, ended = w.threads - w.live;
    for (auto &t : w.all)
        if (!t.done) { current = &t; break; }
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
static void run_block(Worker &w, int64_t order) {
    uint64_t random = order * 1000003 + w.block.x + 7919 * w.block.y + 104729 * w.block.z;
    if (order > 1) shuffle(w.order, random);
    w.live = w.threads;
    w.next = w.arrived = w.generation = w.stacks_used = 0;
    w.hasty = order == 1;
    w.serial++;
    w.idle.clear();
    memset(w.shared, 0xff, w.shared_bytes);
    while (w.next < w.threads && !w.failed) {
        if (w.idle.empty()) w.idle.push_back(w.stacks_used++);
        const int stack = w.idle.back();
        w.idle.pop_back();
        start(w, stack);
    }
    while (w.live && !w.failed) {
        bool any = false, again = false;
        if (order > 1) shuffle(w.order, random);
        for (size_t n = 0; n < w.order.size(); n++) {
            Thread &t = w.all[w.order[n]];
            if (!t.done && !(t.generation && *t.generation == t.since)) {
                t.generation = nullptr;
                any = again = true;
                current = &t;
                hocket_switch(&w.scheduler, t.stack_pointer);
                if (w.failed) return;
            }
            if (w.hasty && n % 32 == 31 && std::exchange(again, false)) n -= 32;  // this warp goes on
        }
        if (!any) say_deadlock(w);
    }
    check_stacks(w);
}

// Memory that ends where nothing may be touched.
static char *guarded(size_t bytes) {
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    char *low = (char *)mmap(nullptr, pages + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (low == MAP_FAILED) abort();
    mprotect(low + PAGE, pages, PROT_READ | PROT_WRITE);
    return low + PAGE + pages - (bytes + 15) / 16 * 16;
}
static void forget_guarded(char *memory, size_t bytes) {
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    munmap(memory + (bytes + 15) / 16 * 16 - pages - PAGE, pages + 2 * PAGE);
}
static void prepare(Worker &w, const Launch &l) {
    w.grid = {(unsigned)l.grid[0], (unsigned)l.grid[1], (unsigned)l.grid[2]};
    w.shape = {(unsigned)l.block[0], (unsigned)l.block[1], (unsigned)l.block[2]};
    w.threads = l.block[0] * l.block[1] * l.block[2];
    w.arguments = l.arguments;
    w.failed = false;
    if (w.stack_count < w.threads) {
        if (w.stacks) munmap(w.stacks - BELOW, BELOW + w.stack_count * STACK);
        const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        w.stacks = (char *)mmap(nullptr, BELOW + w.threads * STACK, PROT_READ | PROT_WRITE, how, -1, 0) + BELOW;
        if (w.stacks - BELOW == MAP_FAILED) abort();
        mprotect(w.stacks - BELOW, BELOW, PROT_NONE);
        w.stack_count = w.threads;
    }
    if (w.shared == nullptr || w.shared_bytes != (size_t)l.shared_bytes) {
        if (w.shared) forget_guarded(w.shared, w.shared_bytes);
        w.shared = guarded(l.shared_bytes);
        w.shared_bytes = l.shared_bytes;
    }
    w.all.resize(w.threads);
    w.order.resize(w.threads);
    w.warps.assign((w.threads + 31) / 32, {});
    for (unsigned i = 0; i < w.threads; i++) {
        Thread &t = w.all[i];
        t.worker = &w;
        t.copies.clear();
        w.order[i] = l.order == 1 ? w.threads - 1 - i : i;
        t.warp = i / 32;
        t.lane = i % 32;
        t.index = {i % w.shape.x, i / w.shape.x % w.shape.y, i / (w.shape.x * w.shape.y)};
    }
}
static void run_grid(void (*enter)(const void *, const void *), const void *kernel, const Launch &l, Report &report) {
    const int64_t blocks = l.grid[0] * l.grid[1] * l.grid[2], threads = l.block[0] * l.block[1] * l.block[2];
    bool legal = threads >= 1 && threads <= (int64_t)MOST_THREADS && l.block[2] <= 64 && l.grid[0] <= 0x7fffffff;
    legal = legal && blocks >= 1 && l.grid[1] <= 65535 && l.grid[2] <= 65535 && l.shared_bytes <= (int64_t)MOST_SHARED;
    if (!legal) {
        report.status = FAILED;
        snprintf(report.text, sizeof report.text, "no device has a grid of %ld x %ld x %ld blocks of %ld threads and %ld bytes",
                 l.grid[0], l.grid[1], l.grid[2], threads, l.shared_bytes);
        return;
    }
    bool stop = false;
#pragma omp parallel num_threads(l.workers) if (l.workers > 1 && blocks > 1)
    {
        static thread_local Worker mine;
        Report own = {};
        catch_faults();
        prepare(mine, l);
        mine.enter = enter;
        mine.kernel = kernel;
        mine.report = &own;
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < blocks; n++) {
            if (__atomic_load_n(&stop, __ATOMIC_RELAXED)) continue;
            const int64_t i = l.order == 1 ? blocks - 1 - n : n;
            mine.block = {unsigned(i % l.grid[0]), unsigned(i / l.grid[0] % l.grid[1]), unsigned(i / (l.grid[0] * l.grid[1]))};
            run_block(mine, l.order);
            current = nullptr;
            if (mine.failed && !__atomic_exchange_n(&stop, true, __ATOMIC_RELAXED)) report = own;
        }
    }
}
template <class Arguments> void launch(void (*kernel)(Arguments), const Launch &l, Report &report) {
    static_assert(sizeof(Arguments) % 8 == 0, "all fields of the arguments of a kernel are 8 bytes");
    if ((int64_t)sizeof(Arguments) != 8 * l.words) {
        report.status = FAILED;
        snprintf(report.text, sizeof report.text, "takes %ld words, the launch gives %ld", sizeof(Arguments) / 8, l.words);
        return;
    }
    using Kernel = void (*)(Arguments);
    run_grid([](const void *k, const void *a) { (*(const Kernel *)k)(*(const Arguments *)a); }, &kernel, l, report);
}

// -------------------------------------------------------------------------------------- barriers and warps

static inline void barrier(int line) {
    Worker &w = *current->worker;
    if (w.arrived == 0) w.line = line;
    else if (w.line != line) fail("threads of one block meet at the barriers of lines %d and %d", w.line, line);
    const unsigned since = w.generation;
    if (++w.arrived == w.threads) w.arrived = 0, w.generation++;
    else wait(&w.generation, since);
}
// Every lane of `mask` brings a pointer; the last to come runs `act` on all of them.
template <class Act> inline void meet(const char *what, unsigned mask, void *brought, Act act) {
    Thread *me = current;
    if (!(mask >> me->lane & 1)) fail("%s with the mask %08x, in which lane %d is not", what, mask, me->lane);
    Meeting &m = me->worker->warps[me->warp].meetings[__builtin_ctz(mask)];
    if (m.arrived && m.mask != mask) fail("%s with the masks %08x and %08x", what, m.mask, mask);
    if (m.arrived && m.what != what) fail("%s meets %s", what, m.what);
    m.mask = mask;
    m.what = what;
    m.brought[me->lane] = brought;
    m.arrived |= 1u << me->lane;
    if (m.arrived != mask) return wait(&m.generation, m.generation);
    m.arrived = 0;
    m.generation++;
    act(m.brought);
}
template <class F> inline void each_lane(unsigned mask, F f) {
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) f(lane);
}
template <class T> struct Shuffled { T value, got; int from; };
template <class T> inline T shuffled(unsigned mask, T value, int from) {
    Shuffled<T> mine{value, value, from};
    meet("shuffle", mask, &mine, [mask](void **all) {
        each_lane(mask, [&](int lane) {
            auto *x = (Shuffled<T> *)all[lane];
            if (!(mask >> x->from & 1)) fail("shuffle of lane %d reads lane %d, which the mask %08x lacks", lane, x->from, mask);
            x->got = ((Shuffled<T> *)all[x->from])->value;
        });
    });
    return mine.got;
}
struct Vote { bool mine; unsigned all; };
static inline unsigned vote(unsigned mask, bool yes) {
    Vote mine{yes, 0};
    meet("vote", mask, &mine, [mask](void **all) {
        unsigned found = 0;
        each_lane(mask, [&](int lane) { found |= (unsigned)((Vote *)all[lane])->mine << lane; });
        each_lane(mask, [&](int lane) { ((Vote *)all[lane])->all = found; });
    });
    return mine.all;
}

// ---------------------------------------------------------------------------------------------- shared memory

template <class T> struct Shared {  // of one declaration and operating-system thread
    char *memory;
    uint64_t serial;
    T &get() {
        Worker &w = *current->worker;
        if (serial != w.serial) {
            if (memory == nullptr) {
                memory = guarded(sizeof(T));
                w.declared.push_back({memory, sizeof(T)});
            }
            memset(memory, 0xff, sizeof(T));
            serial = w.serial;
        }
        return *(T *)memory;
    }
};

// ------------------------------------------------------------------------------------------ what prelude.cuh wraps

// A copy is made only when it is waited for, so that who forgets to wait reads NaN or what was there before; of
// hasty warps it is made at once as well, so that nobody may still read what it overwrites.
static inline void copy_later(void *to, const void *from, int bytes) {
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) fail("copies %d bytes to shared memory, which are not aligned to it", bytes);
    current->copies.push_back({to, from, bytes, current->group});
    if (current->worker->hasty) memcpy(to, from, bytes);
}
static inline void wait_for_copies(int pending) {
    auto &copies = current->copies;
    size_t kept = 0;
    for (auto &c : copies) {
        if (c.group < current->group - pending) memcpy(c.to, c.from, c.bytes);
        else copies[kept++] = c;
    }
    copies.resize(kept);
}
// Fragments as the PTX manual draws them: g = lane / 4, t = lane % 4.
typedef float Eight __attribute__((vector_size(32)));
struct Product { float *d; const unsigned *a, *b; };
template <class Number> inline void multiply_16_8_16(float *d, const unsigned *a, const unsigned *b, Number number) {
    Product mine{d, a, b};
    meet("mma", ~0u, &mine, [number](void **all) {
        float A[16][16];
        Eight B[16];
        for (int lane = 0; lane < 32; lane++) {
            auto *x = (Product *)all[lane];
            const int g = lane / 4, t = lane % 4;
            for (int r = 0; r < 4; r++)
                for (int e = 0; e < 2; e++) A[g + 8 * (r & 1)][2 * t + e + 8 * (r >> 1)] = number(x->a[r] >> (16 * e) & 0xffff);
            for (int r = 0; r < 2; r++)
                for (int e = 0; e < 2; e++) B[2 * t + e + 8 * r][g] = number(x->b[r] >> (16 * e) & 0xffff);
        }
        Eight sum[16] = {};
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < 16; k++) sum[i] += A[i][k] * B[k];
        for (int lane = 0; lane < 32; lane++)
            for (int r = 0; r < 4; r++) ((Product *)all[lane])->d[r] += sum[lane / 4 + 8 * (r >> 1)][2 * (lane % 4) + (r & 1)];
    });
}
// The same of signed bytes: m16n8k32, whose sums are integers.
struct IntProduct { int *d; const unsigned *a, *b; };
static inline void multiply_16_8_32(int *d, const unsigned *a, const unsigned *b) {
    IntProduct mine{d, a, b};
    meet("mma", ~0u, &mine, [](void **all) {
        int A[16][32], B[32][8];
        for (int lane = 0; lane < 32; lane++) {
            auto *x = (IntProduct *)all[lane];
            const int g = lane / 4, t = lane % 4;
            for (int e = 0; e < 4; e++) {
                for (int r = 0; r < 4; r++) A[g + 8 * (r & 1)][4 * t + e + 16 * (r >> 1)] = (int8_t)(x->a[r] >> (8 * e));
                for (int r = 0; r < 2; r++) B[4 * t + e + 16 * r][g] = (int8_t)(x->b[r] >> (8 * e));
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            auto *x = (IntProduct *)all[lane];
            const int g = lane / 4, t = lane % 4;
            for (int r = 0; r < 4; r++)
                for (int k = 0; k < 32; k++) x->d[r] += A[g + 8 * (r >> 1)][k] * B[k][2 * t + (r & 1)];
        }
    });
}
// Four 8 x 8 matrices of 16-bit numbers; lane l brings the address of row l % 8 of matrix l / 8.
struct Fragment { unsigned *got; const void *row; };
static inline void load_matrices(unsigned *got, const void *row, bool transposed) {
    if ((uintptr_t)row % 16) fail("ldmatrix from an address that is not aligned to 16 bytes");
    Fragment mine{got, row};
    meet("ldmatrix", ~0u, &mine, [transposed](void **all) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++) {
                unsigned pair = 0;
                for (int e = 0; e < 2; e++) {
                    const int row = transposed ? 2 * (lane % 4) + e : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + e;
                    uint16_t bits;
                    memcpy(&bits, (const char *)((Fragment *)all[8 * m + row])->row + 2 * column, 2);
                    pair |= (unsigned)bits << (16 * e);
                }
                ((Fragment *)all[lane])->got[m] = pair;
            }
    });
}

}  // namespace emulation

// ----------------------------------------------------------------------------------------- CUDA's own names

#define threadIdx (emulation::current->index)
#define blockIdx (emulation::current->worker->block)
#define blockDim (emulation::current->worker->shape)
#define gridDim (emulation::current->worker->grid)
#define __syncthreads() emulation::barrier(__LINE__)
constexpr int warpSize = 32;

static inline void __syncwarp(unsigned mask = ~0u) { emulation::meet("__syncwarp", mask, nullptr, [](void **) {}); }
template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    const int lane = emulation::current->lane;
    return emulation::shuffled(mask, value, (lane & ~(width - 1)) | (from & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32) {
    const int lane = emulation::current->lane, from = lane ^ by;
    return emulation::shuffled(mask, value, (from & ~(width - 1)) == (lane & ~(width - 1)) ? from : lane);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = emulation::current->lane, from = lane - (int)by;
    return emulation::shuffled(mask, value, from < (lane & ~(width - 1)) ? lane : from);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = emulation::current->lane, from = lane + (int)by;
    return emulation::shuffled(mask, value, from > (lane | (width - 1)) ? lane : from);
}
static inline unsigned __ballot_sync(unsigned mask, int yes) { return emulation::vote(mask, yes != 0); }
static inline int __any_sync(unsigned mask, int yes) { return emulation::vote(mask, yes != 0) != 0; }
static inline int __all_sync(unsigned mask, int yes) { return emulation::vote(mask, yes != 0) == mask; }

// Of integers only: sums of floats in any order are no results.
template <class T> T atomicAdd(T *at, T by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
template <class T> T atomicExch(T *at, T value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }
template <class T> T atomicCAS(T *at, T expected, T value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T> T atomicMax(T *at, T value) {
    T was = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (was < value && !__atomic_compare_exchange_n(at, &was, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return was;
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline int __float2int_rn(float x) { return x != x ? 0 : (int)lrintf(fminf(fmaxf(x, -2147483648.0f), 2147483520.0f)); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static inline int __float_as_int(float x) { int u; memcpy(&u, &x, 4); return u; }
static inline float __int_as_float(int u) { float x; memcpy(&x, &u, 4); return x; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned found = 0;
    for (int i = 0; i < 4; i++) found |= (unsigned)(both >> 8 * (s >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}
#define HOCKET_MIN_MAX(T)                                            \
    static inline T min(T a, T b) { return b < a ? b : a; }          \
    static inline T max(T a, T b) { return a < b ? b : a; }
HOCKET_MIN_MAX(int)
HOCKET_MIN_MAX(unsigned)
HOCKET_MIN_MAX(long long)
HOCKET_MIN_MAX(unsigned long long)
