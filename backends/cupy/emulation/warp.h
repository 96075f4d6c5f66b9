// Operations of several threads: barriers, warp operations, shared memory, and the instructions that cuda.cuh wraps.
#pragma once

#include "launch.h"

namespace emulation {

// -------------------------------------------------------------------------------------- barriers and warps

static inline void barrier(const char *file, int line) {
    Worker &w = *current->worker;
    if (is_dropped(file, line)) return;
    if (w.arrived == 0) w.line = line;
    else if (w.line != line) fail("threads of one block meet at the barriers of lines %d and %d", w.line, line);
    const unsigned since = w.generation;
    if (++w.arrived == w.threads) w.arrived = 0, w.generation++, note_together(0);
    else wait(&w.generation, since);
}
// Run a warp operation: every lane of `mask` passes a pointer, and the last lane to arrive runs `act` on all pointers. If
// `place` is given, all lanes must be at the same place of the code.
template <class Act> inline void meet(const char *what, unsigned mask, void *brought, Act act, const void *place = nullptr) {
    Thread *me = current;
    if (!(mask >> me->lane & 1)) fail("%s with the mask %08x, in which lane %d is not", what, mask, me->lane);
    Meeting &m = me->worker->warps[me->warp].meetings[__builtin_ctz(mask)];
    if (m.arrived && m.mask != mask) fail("%s with the masks %08x and %08x", what, m.mask, mask);
    if (m.arrived && m.what != what) fail("%s meets %s", what, m.what);
    if (m.arrived && m.place != place) fail("%s at two places of the code", what);
    m.mask = mask;
    m.what = what;
    m.place = place;
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
template <class T> inline T shuffled(unsigned mask, T value, int from, const void *place = nullptr) {
    Shuffled<T> mine{value, value, from};
    meet("shuffle", mask, &mine, [mask](void **all) {
        each_lane(mask, [&](int lane) {
            auto *x = (Shuffled<T> *)all[lane];
            if (!(mask >> x->from & 1)) fail("shuffle of lane %d reads lane %d, which the mask %08x lacks", lane, x->from, mask);
            x->got = ((Shuffled<T> *)all[x->from])->value;
        });
    }, place);
    return mine.got;
}
struct Vote { bool mine; unsigned all; };
static inline unsigned vote(unsigned mask, bool yes, const void *place = nullptr) {
    Vote mine{yes, 0};
    meet("vote", mask, &mine, [mask](void **all) {
        unsigned found = 0;
        each_lane(mask, [&](int lane) { found |= (unsigned)((Vote *)all[lane])->mine << lane; });
        each_lane(mask, [&](int lane) { ((Vote *)all[lane])->all = found; });
    }, place);
    return mine.all;
}

// ---------------------------------------------------------------------------------------------- shared memory

template <class T> struct Shared {  // the memory of one shared declaration, for one operating-system thread
    struct { char *memory; uint64_t serial; } of[MOST_BLOCKS];  // by rank
    T &get() {
        Worker &w = *current->worker;
        auto &[memory, serial] = of[w.rank];
        if (serial != w.serial) {
            Hidden fills;
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

// --------------------------------------------------------------------------------------- instructions of cuda.cuh

// Check a prefetched address: it is no access of the kernel, but must be in an operand.
static inline void check_reach(const void *p) {
    Hidden mine;
    (void)*(const volatile char *)p;
}
// Issue an asynchronous copy. It is made at the wait, so that a kernel without the wait reads NaN or old values. For hasty
// warps it is also made at once, so that a thread that still reads the old values gets wrong ones.
HOCKET_PLACED static inline void copy_later(void *to, const void *from, int bytes) {
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) fail("copies %d bytes to shared memory, which are not aligned to it", bytes);
    count(from, bytes, false, (uint64_t)__builtin_return_address(0));
    count(to, bytes, true, (uint64_t)__builtin_return_address(0));
    current->copies.push_back({to, from, bytes, current->group, (uint64_t)__builtin_return_address(0)});
    if (current->worker->hasty) memcpy(to, from, bytes);
}
static inline void wait_for_copies(int pending) {
    Hidden mine;
    auto &copies = current->copies;
    size_t kept = 0;
    for (auto &c : copies) {
        if (c.group < current->group - pending) memcpy(c.to, c.from, c.bytes), note_arrival(c.to, c.bytes, c.code);
        else copies[kept++] = c;
    }
    copies.resize(kept);
    current->has_waited = true;
}
// Matrix fragments have the layouts of the PTX manual: g = lane / 4, t = lane % 4.
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
// Multiply signed bytes: m16n8k32, with integer sums.
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
// Load four 8 x 8 matrices of 16-bit numbers. Lane l passes the address of row l % 8 of matrix l / 8.
struct Fragment { unsigned *got; const void *row; };
HOCKET_PLACED static inline void load_matrices(unsigned *got, const void *row, bool transposed) {
    if ((uintptr_t)row % 16) fail("ldmatrix from an address that is not aligned to 16 bytes");
    count(row, 16, false, (uint64_t)__builtin_return_address(0));
    Fragment mine{got, row};
    meet("ldmatrix", ~0u, &mine, [transposed](void **all) {
        Hidden reads;
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
