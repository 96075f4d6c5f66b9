// Warpgroup products, which wgmma.cuh wraps. They run at some time between their begin and the wait for them.
//
// Each warp computes its own 16 rows at the wait. So a kernel that overwrites an operand too early, or does not wait, gets
// wrong numbers or NaN. Hasty warps compute at once, so that both operands must be complete at the begin.
#pragma once

#include "warp.h"

namespace emulation {

// The address of dynamic shared memory. It is not aligned for operands, because other memory may precede it on a device.
constexpr unsigned SIZED_FROM = 1040;
static inline unsigned shared_address(const void *p) {
    const Worker &w = *current->worker;
    const size_t offset = (const char *)p - w.shared;
    if (offset > w.shared_bytes) fail("asks for the address of something else than shared memory that the launch sizes");
    return SIZED_FROM + offset;
}

// ---------------------------------------------------------------------------------------------------- operands

// The decoded matrix descriptor of an operand in shared memory, as in the PTX manual: addresses, strides and swizzle mode.
struct Layout { unsigned first, leading, stride, mode, width; };  // `width`: contiguous bytes of a row
HOCKET_UNSEEN static Layout decoded(uint64_t operand) {
    if (operand >> 49 & 7) fail("a product has an operand with a base offset, which is not modelled");
    const auto bytes = [operand](int from) { return (unsigned)(operand >> from & 0x3fff) << 4; };
    const unsigned mode = operand >> 62;
    return {bytes(0), bytes(16), bytes(32), mode, mode ? 256u >> mode : 16};
}
HOCKET_UNSEEN static const char *place_in(const Layout &o, unsigned from_first) {
    unsigned at = o.first + from_first;
    if (o.mode) at ^= at >> 3 & (o.width - 1) & 0x70;
    const Worker &w = *current->worker;
    if (at < SIZED_FROM || at - SIZED_FROM + 16 > w.shared_bytes)
        fail("a product reads shared memory outside of its %zu bytes", w.shared_bytes);
    return w.shared + (at - SIZED_FROM);
}
// Return the address of 8 numbers of a row along the contraction: half `half` of 16. The operand is K-major.
HOCKET_UNSEEN static const char *piece_of(uint64_t operand, int row, int half) {
    const Layout o = decoded(operand);
    return place_in(o, row / 8 * o.stride + row % 8 * o.width + half * (o.mode ? 16 : o.leading));
}
// Return the address of columns 8 j to 8 j + 7 in one of the 16 rows of the contraction. The operand is MN-major.
HOCKET_UNSEEN static const char *piece_across(uint64_t operand, int row, int j) {
    const Layout o = decoded(operand);
    if (!o.mode) fail("a product has an operand of columns beside each other that is not swizzled, which is not modelled");
    const unsigned from = 16 * j;
    return place_in(o, row / 8 * o.stride + row % 8 * o.width + from / o.width * o.leading + from % o.width);
}
HOCKET_UNSEEN static void read_piece(float *to, const Asynchronous &p, const char *piece) {
    uint16_t bits[8];
    memcpy(bits, piece, 16);
    for (int i = 0; i < 8; i++) to[i] = p.number(bits[i]);
}
// Read one of the 16 rows of the first operand that belong to the current warp.
HOCKET_UNSEEN static void read_row(float (&to)[16], const Asynchronous &p, int row) {
    if (p.registers[0] == nullptr) {
        for (int half = 0; half < 2; half++) read_piece(to + 8 * half, p, piece_of(p.a, current->warp % 4 * 16 + row, half));
        return;
    }
    for (int k = 0; k < 16; k++)
        to[k] = p.number(p.registers[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> 16 * (k % 2) & 0xffff);
}
// Log the loads of a product. Eight rows are one request, so that a wrong swizzle causes bank conflicts. Each warp of a
// group reads a quarter of the second operand for all four.
static void note_reads(const Asynchronous &p, bool again) {
    Thread *me = current;
    const int quarter = me->warp % 4, part = p.columns / 4;
    const auto note = [&](const char *piece, int i) {
        current = &me->worker->all[me->warp * 32 + i % 32];
        read_by_product(piece, 16, p.code, again);
        current = me;
    };
    const bool held = p.registers[0];
    for (int i = 0; !held && i < 32; i++) note(piece_of(p.a, quarter * 16 + i / 16 * 8 + i % 8, i / 8 % 2), i);
    for (int i = 0; i < 2 * part; i++)
        note(held ? piece_across(p.b, i % 16, quarter * part / 8 + i / 16) : piece_of(p.b, quarter * part + i / 16 * 8 + i % 8, i / 8 % 2), i);
}

// ---------------------------------------------------------------------------------------------------- products

HOCKET_UNSEEN static void make(const Asynchronous &p, float *sums) {
    float A[16], row[16], B[16][256];
    if (p.registers[0]) {
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < p.columns / 8; j++) read_piece(&B[k][8 * j], p, piece_across(p.b, k, j));
    } else {
        for (int n = 0; n < p.columns; n++) {
            for (int half = 0; half < 2; half++) read_piece(row + 8 * half, p, piece_of(p.b, n, half));
            for (int k = 0; k < 16; k++) B[k][n] = row[k];
        }
    }
    for (int m = 0; m < 16; m++) {
        read_row(A, p, m);
        for (int j = 0; j < p.columns / 8; j++) {
            Eight sum = {};
            for (int k = 0; k < 16; k++) {
                Eight b;
                memcpy(&b, &B[k][8 * j], sizeof b);
                sum += A[k] * b;
            }
            for (int n = 0; n < 8; n++) {
                float &of = sums[(m % 8 * 4 + n / 2) * p.columns / 2 + 4 * j + m / 8 * 2 + n % 2];
                of = p.adds ? of + sum[n] : sum[n];
            }
        }
    }
}
struct Begun { float *sums; const unsigned *registers; uint64_t a, b; };
HOCKET_PLACED static void begin_product(
    float *sums, int columns, bool adds, uint64_t a, const unsigned *registers, uint64_t b, float (*number)(unsigned)) {
    Begun mine{sums, registers, a, b};
    const uint64_t code = (uint64_t)__builtin_return_address(0);
    meet("wgmma", ~0u, &mine, [=](void **all) {
        Warp &warp = current->worker->warps[current->warp];
        Asynchronous p{columns, warp.group, adds, {}, {}, a, b, number, code};
        for (int lane = 0; lane < 32; lane++) {
            auto *x = (Begun *)all[lane];
            if (x->a != a || x->b != b) fail("lanes of a warp begin products of different operands");
            p.sums[lane] = x->sums, p.registers[lane] = x->registers;
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
            bool is_last = true;  // the last product with these accumulators
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
