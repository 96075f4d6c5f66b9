// What wgmma.cuh wraps: products of warpgroups, which run some time between their begin and the wait for them.
//
// Each warp makes its own 16 rows, when it waits, so that who overwrites an operand or does not wait has other numbers or
// NaN; of hasty warps they are made at once, so that both operands must be there.
#pragma once

#include "warp.h"

namespace emulation {

// Addresses of shared memory that a launch sizes begin at no multiple of what operands need: other memory stands before.
constexpr unsigned SIZED_FROM = 1040;
static inline unsigned shared_address(const void *p) {
    const Worker &w = *current->worker;
    const size_t offset = (const char *)p - w.shared;
    if (offset > w.shared_bytes) fail("asks for the address of something else than shared memory that the launch sizes");
    return SIZED_FROM + offset;
}

// ---------------------------------------------------------------------------------------------------- operands

// Piece `half` of 8 columns of a row, as the PTX manual has it of operands whose rows lie in memory by columns.
HOCKET_UNSEEN static const char *piece_of(uint64_t operand, int row, int half) {
    const unsigned first = (operand & 0x3fff) << 4, leading = (operand >> 16 & 0x3fff) << 4, stride = (operand >> 32 & 0x3fff) << 4;
    const unsigned mode = operand >> 62, width = mode ? 256 >> mode : 16;  // bytes of a row that lie together
    if (operand >> 49 & 7) fail("a product has an operand with a base offset, which is not modelled");
    unsigned at = first + row / 8 * stride + row % 8 * width + half * (mode ? 16 : leading);
    if (mode) at ^= at >> 3 & (width - 1) & 0x70;
    const Worker &w = *current->worker;
    if (at < SIZED_FROM || at - SIZED_FROM + 16 > w.shared_bytes)
        fail("a product reads shared memory outside of its %zu bytes", w.shared_bytes);
    return w.shared + (at - SIZED_FROM);
}
HOCKET_UNSEEN static void read_row(float (&to)[16], const Asynchronous &p, uint64_t operand, int row) {
    for (int half = 0; half < 2; half++) {
        uint16_t bits[8];
        memcpy(bits, piece_of(operand, row, half), 16);
        for (int i = 0; i < 8; i++) to[8 * half + i] = p.number(bits[i]);
    }
}
// Eight rows of a piece are one access: banks show who swizzles otherwise.  Of the second operand each warp of a group
// reads a quarter for all.
static void note_reads(const Asynchronous &p, bool again) {
    Thread *me = current;
    const int quarter = me->warp % 4, rows[2] = {16, p.columns / 4};
    for (int which = 0; which < 2; which++)
        for (int i = 0; i < 2 * rows[which]; i++) {
            const char *piece = piece_of(which ? p.b : p.a, quarter * rows[which] + i / 16 * 8 + i % 8, i / 8 % 2);
            current = &me->worker->all[me->warp * 32 + i % 32];
            read_by_product(piece, 16, p.code, again);
            current = me;
        }
}

// ---------------------------------------------------------------------------------------------------- products

HOCKET_UNSEEN static void make(const Asynchronous &p, float *sums) {
    float A[16], row[16];
    Eight B[16][32];
    for (int n = 0; n < p.columns; n++) {
        read_row(row, p, p.b, n);
        for (int k = 0; k < 16; k++) B[k][n / 8][n % 8] = row[k];
    }
    for (int m = 0; m < 16; m++) {
        read_row(A, p, p.a, current->warp % 4 * 16 + m);
        for (int j = 0; j < p.columns / 8; j++) {
            Eight sum = {};
            for (int k = 0; k < 16; k++) sum += A[k] * B[k][j];
            for (int n = 0; n < 8; n++) sums[(m % 8 * 4 + n / 2) * p.columns / 2 + 4 * j + m / 8 * 2 + n % 2] += sum[n];
        }
    }
}
struct Begun { float *sums; uint64_t a, b; };
HOCKET_PLACED static void begin_product(float *sums, int columns, uint64_t a, uint64_t b, float (*number)(unsigned)) {
    Begun mine{sums, a, b};
    const uint64_t code = (uint64_t)__builtin_return_address(0);
    meet("wgmma", ~0u, &mine, [=](void **all) {
        Warp &warp = current->worker->warps[current->warp];
        Asynchronous p{columns, warp.group, {}, a, b, number, code};
        for (int lane = 0; lane < 32; lane++) {
            auto *x = (Begun *)all[lane];
            if (x->a != a || x->b != b) fail("lanes of a warp begin products of different operands");
            p.sums[lane] = x->sums;
        }
        auto &kept = warp.sums[p.sums[0]];
        if (kept.empty()) {
            if (!warp.is_fenced) fail("begins a product whose registers no wgmma.fence stands before");
            for (float *d : p.sums) kept.insert(kept.end(), d, d + columns / 2), memset(d, 0xff, columns / 2 * sizeof *d);
        }
        note_reads(p, false);
        if (current->worker->hasty) make(p, kept.data());
        warp.products.push_back(p);
        warp.begun = (warp.begun * 31 + a) * 31 + b;
    });
}
static inline void fence_registers() {
    meet("wgmma.fence", ~0u, nullptr, [](void **) { current->worker->warps[current->warp].is_fenced = true; });
}
static inline void commit_products() {
    meet("wgmma.commit_group", ~0u, nullptr, [](void **) { current->worker->warps[current->warp].group++; });
}
static inline void wait_for_products(int pending) {
    meet("wgmma.wait_group", ~0u, nullptr, [pending](void **) {
        Warp &warp = current->worker->warps[current->warp];
        auto &products = warp.products;
        size_t over = 0;
        for (; over < products.size() && products[over].group < warp.group - pending; over++) {
            note_reads(products[over], true);
            if (!current->worker->hasty) make(products[over], warp.sums[products[over].sums[0]].data());
        }
        for (size_t i = 0; i < over; i++) {
            bool is_last = true;  // of these sums
            for (size_t j = i + 1; j < products.size(); j++) is_last &= products[j].sums[0] != products[i].sums[0];
            if (!is_last) continue;
            const int each = products[i].columns / 2;
            const auto kept = warp.sums.extract(products[i].sums[0]);
            for (int lane = 0; lane < 32; lane++) memcpy(products[i].sums[lane], &kept.mapped()[lane * each], each * sizeof(float));
        }
        products.erase(products.begin(), products.begin() + over);
        warp.is_fenced = false;
    });
}

}  // namespace emulation
