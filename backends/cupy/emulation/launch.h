// Runs one launch: its clusters of blocks, on operating-system threads.
#pragma once

#include <numeric>

#include "cluster.h"

namespace emulation {

// Allocate memory between two guard zones. It ends less than 16 bytes before the second one.
static char *guarded(size_t bytes) {
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    char *low = (char *)mmap(nullptr, pages + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (low == MAP_FAILED) abort();
    mprotect(low + GUARD, pages, PROT_READ | PROT_WRITE);
    return low + GUARD + pages - (bytes + 15) / 16 * 16;
}
static void forget_guarded(char *memory, size_t bytes) {
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    munmap(memory + (bytes + 15) / 16 * 16 - pages - GUARD, pages + 2 * GUARD);
}
// The fiber stacks of an operating-system thread, for each block of a cluster. All libraries of a process share them,
// because g++ makes inline variables unique.
struct Stacks {
    char *low;
    size_t count;
    void release() {
        if (low) munmap(low - BELOW, BELOW + count * STACK);
        low = nullptr, count = 0;
    }
    ~Stacks() { release(); }
};
inline thread_local Stacks stacks_of[MOST_BLOCKS];

static void prepare(Worker &w, const Launch &l, unsigned rank) {
    w.grid = {(unsigned)l.grid[0], (unsigned)l.grid[1], (unsigned)l.grid[2]};
    w.shape = {(unsigned)l.block[0], (unsigned)l.block[1], (unsigned)l.block[2]};
    w.threads = l.block[0] * l.block[1] * l.block[2];
    w.arguments = l.arguments;
    w.failed = false;
    Stacks &kept = stacks_of[rank];
    if (kept.count < w.threads) {
        kept.release();
        const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        kept.low = (char *)mmap(nullptr, BELOW + w.threads * STACK, PROT_READ | PROT_WRITE, how, -1, 0) + BELOW;
        if (kept.low - BELOW == MAP_FAILED) abort();
        mprotect(kept.low - BELOW, BELOW, PROT_NONE);
        kept.count = w.threads;
    }
    w.stacks = kept.low, w.stack_count = kept.count;
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
// Return the index of block `rank` of a cluster in the grid. Ranks count along x first, then y, then z.
static dim3 block_of(const Launch &l, int64_t cluster, int64_t rank) {
    unsigned at[3];
    for (int i = 0; i < 3; i++) {
        const int64_t each = l.cluster[i], many = l.grid[i] / each;
        at[i] = cluster % many * each + rank % each;
        cluster /= many, rank /= each;
    }
    return {at[0], at[1], at[2]};
}
// Clusters are visited forward (order 0), backward (1), or in steps through the whole grid: then blocks that share a
// counter do not come one after the other, nor do those of one row of the grid. The step and `clusters` are coprime.
static int64_t step_of(int order, int64_t clusters) {
    if (order < 2) return 1;
    int64_t step = (int64_t)(0.618 * (double)clusters) | 1;
    while (std::gcd(step, clusters) > 1) step += 2;
    return step;
}
static void run_grid(void (*enter)(const void *, const void *), const void *kernel, const Launch &l, Report &report) {
    const int64_t blocks = l.grid[0] * l.grid[1] * l.grid[2], threads = l.block[0] * l.block[1] * l.block[2];
    const int64_t size = l.cluster[0] * l.cluster[1] * l.cluster[2], clusters = blocks / size;
    bool legal = threads >= 1 && threads <= (int64_t)MOST_THREADS && l.block[2] <= 64 && l.grid[0] <= 0x7fffffff;
    legal = legal && blocks >= 1 && l.grid[1] <= 65535 && l.grid[2] <= 65535 && l.shared_bytes <= (int64_t)MOST_SHARED;
    if (!legal) {
        report.status = FAILED;
        snprintf(report.text, sizeof report.text, "no device has a grid of %ld x %ld x %ld blocks of %ld threads and %ld bytes",
                 l.grid[0], l.grid[1], l.grid[2], threads, l.shared_bytes);
        return;
    }
    for (int i = 0; i < 3; i++) legal = legal && l.grid[i] % l.cluster[i] == 0;
    if (!legal || size > (int64_t)MOST_BLOCKS) {
        report.status = FAILED;
        snprintf(report.text, sizeof report.text, "no device divides a grid of %ld x %ld x %ld blocks into clusters of %ld x %ld x %ld",
                 l.grid[0], l.grid[1], l.grid[2], l.cluster[0], l.cluster[1], l.cluster[2]);
        return;
    }
    const int64_t step = step_of((int)l.order, clusters);
    bool stop = false;
#pragma omp parallel num_threads(l.workers) if (l.workers > 1 && clusters > 1)
    {
        static thread_local Worker mine[MOST_BLOCKS];
        Cluster cluster = {mine, (unsigned)size};
        Report own = {};
        catch_faults();
        for (unsigned i = 0; i < size; i++) {
            Worker &w = mine[i];
            prepare(w, l, i);
            w.enter = enter, w.kernel = kernel, w.report = &own;
            w.cluster = &cluster, w.rank = i;
        }
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < clusters; n++) {
            if (__atomic_load_n(&stop, __ATOMIC_RELAXED)) continue;
            const int64_t i = l.order == 1 ? clusters - 1 - n : n * step % clusters;
            for (int64_t r = 0; r < size; r++) mine[r].block = block_of(l, i, r);
            run_cluster(cluster, l.order);
            current = nullptr;
            if (own.status && !__atomic_exchange_n(&stop, true, __ATOMIC_RELAXED)) report = own;
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

}  // namespace emulation
