// Products of few tokens with packed weights.

// Rounded rows of x in shared memory: where a block of 32 begins, in pieces of 16 bytes.  It has two of codes and one of
// scales of each row; of blocks that are read or written at once each lies in other banks.
template <int N> __device__ __forceinline__ u32 place(u32 block) { return (3 * N | 1) * block + block / 8; }
struct Few {
    struct Product {
        const u8 *w;
        float *out;
        i64 first, units, rows, out_step;  // the first of its groups
    } product[MOST_PRODUCTS];
    i64 products, unit;  // a unit has two products, whose groups take turns, and makes one result of them
    const float *x;
    i64 blocks, row_bytes, tokens, x_step;  // `tokens` rows of x for each entry
    i64 groups, of_block, of_warp, chunks;  // of all products; of a block; parts that a warp takes of a stretch; its chunks
    i64 used, shared;
    Choice choice;
    i64 chosen;     // entries; those behind them are of one more expert, whose unit is of products 2 and 3
    Summed summed;  // its other expert is that of product 1
    Prologue::Words prologue;
};
// Where the rows of a group are: in which product, and which of its groups.
struct Group {
    int which, number;
    __device__ __forceinline__ Group(const Few &a, int group) : which(0), number(group) {
        if (a.unit) {
            which = group % 2, number = group / 2;
        } else {
            while (which + 1 < (int)a.products && group >= (int)a.product[which + 1].first) which++;
            number -= (int)a.product[which].first;
        }
    }
};
// A part is a group of DOWN rows and a chunk of columns, of which a lane has OWN blocks of a row.  The fewest rows that fill
// sectors leave the most groups to be dealt; half as many, ROWS, where blocks would share these out unevenly.
template <class F, int N, int ROWS = 0> struct Part {
    static constexpr bool IS_TIGHT = F::EXTRA > 16 && N > 2;  // digits of TQ1_0 take registers
    static constexpr int DOWN = ROWS ? ROWS : F::SUPER <= 2 ? 16 : 8, OWN = IS_TIGHT ? 1 : F::LOW == 8 || N > 1 ? 2 : 4, CHUNK = OWN * 32 / DOWN;
    static constexpr int RECORDS = OWN > F::SUPER ? OWN / F::SUPER : 1;
    RowCodes<F> codes[OWN];
    typename F::Record records[RECORDS];
    __device__ __forceinline__ void load(const Unit<F> &unit, int block, int end, int row) {
        if (block + OWN <= end) {
#pragma unroll
            for (int i = 0; i < OWN; i++) load_one(unit, block, i, row);
        } else {
            *this = {};
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if (block + i < end) load_one(unit, block, i, row);
        }
    }
    __device__ __forceinline__ void load_one(const Unit<F> &unit, int block, int i, int row) {
        codes[i].load(unit, (u32)block, (u32)i, row);
        if (i % F::SUPER == 0) records[i / F::SUPER] = unit.record(block + i, row);
    }
    // Adds the products with N rows of x, whose block `block` stands at `x`.
    __device__ __forceinline__ void add(float (&sum)[N], const uint4 *x, int block) const {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const Scales own = F::scales(records[i / F::SUPER % RECORDS], F::SUPER == 1 ? 0 : (int)((u32)block % F::SUPER & -OWN) | i);
            const Scales s = F::scaled(own, codes[i].at(0));
            u32 q[2][4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const Codes c = codes[i].at(t);
                q[0][t] = F::codes(c, 0), q[1][t] = F::codes(c, 1);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const uint4 *mine = x + place<N>(i) + 3 * n;
                i32 dot[2] = {MAGIC_BITS, MAGIC_BITS};
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint4 v = mine[h];
                    i32 &d = dot[F::HALVES ? h : 0];
                    d = dp4a(q[h][3], v.w, dp4a(q[h][2], v.z, dp4a(q[h][1], v.y, dp4a(q[h][0], v.x, d))));
                }
                const float4 v = *(const float4 *)(mine + 2);
                sum[n] = fmaf(fmaf(__int_as_float(dot[0]), v.x, v.y), s.scale[0], sum[n]);
                if (F::HALVES) sum[n] = fmaf(fmaf(__int_as_float(dot[1]), v.x, v.y), s.scale[1], sum[n]);
                if (F::BIAS) sum[n] = fmaf(s.bias[0], F::HALVES ? v.w : v.z, sum[n]);
                if (F::BIAS && F::HALVES) sum[n] = fmaf(s.bias[1], v.z - v.w, sum[n]);
            }
        }
    }
};
// As many blocks as a device has multiprocessors share all rows out, and a block its parts to its warps, so that one wave
// keeps all of the device busy to its end.  A block rounds x once, a stretch of columns that shared memory has room for,
// while the first weights are on their way: it has asked for them before it waits for earlier launches, if these do not
// choose its experts.  The next ones come while a warp multiplies.  What a warp has of a group it adds up; then the sums of
// warps are added in order.
//
// With 16 warps on a multiprocessor, which each wait for up to 4 KiB of codes, some 64 KiB are in flight, of 29 KiB that
// hide 800 ns at 4.8 TB/s.
//
// Where a token's entries are summed, a block has all of them for each of its groups of rows, one after the other, and x
// of all of them in one stretch.
template <class F, int N, bool SUMS, int ROWS = 0> __device__ __forceinline__ void multiply(const Few &a) {
    using P = Part<F, N, ROWS>;
    static_assert(N == 1 || !SUMS, "entries are summed for one token at a time");
    constexpr int SIZE = N * P::DOWN;  // of the sums of a group
    DYNAMIC_SHARED(room, uint4);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int of_block = (int)a.of_block, of_warp = (int)a.of_warp, most = (int)a.chunks;
    const bool is_other = N == 1 && !SUMS && blockIdx.y >= a.chosen;  // an entry of experts is a row
    const u32 entry = is_other ? blockIdx.y - (u32)a.chosen : blockIdx.y;
    const u32 own_entries = SUMS ? a.summed.entries() : 1, used = SUMS ? (u32)a.summed.used : 1;
    int matrix = 0, skipped = 0;  // blocks of x before those of the entry
    if (a.choice.ids && !is_other) {
        wait_for_earlier();
        if (blockIdx.x == 0 && threadIdx.x < used) a.choice.check(entry * used + threadIdx.x);
        if (!SUMS) matrix = (int)a.choice.matrix_of(entry);
    }
    const i64 x_row = a.used == 1 || is_other ? entry * a.shared : row_of(entry, a.used, a.shared);  // most have no need of a division
    const float *x = a.x + x_row * (SUMS ? used : a.tokens) * a.x_step;
    int end = matrix < 0 ? 0 : (int)a.blocks;  // one of elsewhere adds nothing
    const int first = (int)blockIdx.x * of_block, groups = min(of_block, (int)a.groups - first);
    const int own = lane / P::DOWN * P::OWN;  // blocks of a chunk before those of this lane
    const int padded = (most * P::CHUNK + 7) / 8 * 8;  // blocks of an entry's x
    float *parts = (float *)(room + place<N>(SUMS ? own_entries * padded : most * P::CHUNK)), *sums = parts + (warps + groups) * SIZE;
    const int joined = SUMS ? (int)own_entries : a.unit ? 2 : 1;  // groups that make one result
    const int results = (u32)groups / (u32)joined * SIZE;
    float *numbers = sums + groups * SIZE;  // of the rows of x, where they are computed
    auto each_own = [&](auto take) {
        for (int i = threadIdx.x; i < results; i += blockDim.x)
            for (int k = 0; k < joined; k++) take((i / SIZE * joined + k) * SIZE + i % SIZE);
    };
    each_own([&](int i) { sums[i] = 0.0f; });
    for (int start = 0; start < end; start += most * P::CHUNK) {
        const int chunks = min(most, (end - start + P::CHUNK - 1) / P::CHUNK);
        int part = warp * of_warp, group = (u32)part / (u32)chunks, chunk = part - group * chunks;
        const int upto = min(part + of_warp, groups * chunks);
        Unit<F> unit;
        int row;
        auto enter = [&] {
            const u32 number = first + group, own_entry = SUMS ? number % own_entries : 0;
            const Group at(a, SUMS ? number / own_entries : number);
            const int above = at.number * P::DOWN;
            row = above % 32 + lane % P::DOWN;
            if (SUMS) {
                matrix = own_entry < used ? (int)a.choice.matrix_of(entry * used + own_entry) : 0;
                end = matrix < 0 ? 0 : (int)a.blocks;
                skipped = own_entry * padded;
            }
            const Few::Product &taken = a.product[SUMS ? own_entry >= used : at.which + (is_other ? 2 : 0)];
            unit = Unit<F>(taken.w, (SUMS ? max(matrix, 0) : matrix) * (int)taken.units + above / 32, a.blocks, a.row_bytes);
        };
        auto load = [&](P &to) { to.load(unit, start + chunk * P::CHUNK + own, end, row); };
        P even, odd;
        if (part < upto) {
            enter();
            load(even);
        }
        if (start == 0) F::load_book();
        wait_for_earlier();
        const u32 rows = SUMS ? own_entries : N;
        auto row_at = [&](u32 i) {
            if (!SUMS) return x + min((i64)(i % N), a.tokens - 1) * a.x_step;
            return i % rows < used ? x + i % rows * a.x_step : a.summed.x + entry * a.summed.x_step;
        };
        if (Prologue::NUMBERS > 0 && start == 0) {
            for (int n = 0; n < (int)a.tokens; n++)
                Prologue::reduce(a.prologue, n, (int)a.blocks * 32, numbers + n * Prologue::NUMBERS, numbers + N * Prologue::NUMBERS);
            __syncthreads();
        }
        constexpr int TOGETHER = Prologue::COMPUTES ? 1 : 2;  // eights of blocks, each of which a warp rounds at once
        const int eights = (chunks * P::CHUNK + 7) / 8;       // of a row
        for (int eight = TOGETHER * warp; eight < (int)rows * eights; eight += TOGETHER * warps) {
            float4 brought[TOGETHER][2];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                const int block = start + (u32)(eight + i) / rows * 8, blocks = SUMS ? (int)a.blocks : end;
                if (Prologue::COMPUTES) {
                    const int n = eight % N, token = min(n, (int)a.tokens - 1);
                    Prologue::bring(a.prologue, numbers + token * Prologue::NUMBERS, brought[i], token, (int)a.blocks * 32, block, blocks, blockIdx.x == 0 && n == token);
                } else {
                    bring(brought[i], row_at(eight + i), block, blocks);
                }
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                const Rounded r = round_block(brought[i]);
                const int block = (u32)(eight + i) / rows * 8 + lane / 4;
                if (block < chunks * P::CHUNK) {
                    uint4 *to = room + (SUMS ? place<N>((eight + i) % rows * padded + block) : place<N>(block) + 3 * ((eight + i) % N));
                    ((u32 *)to)[lane % 4] = r.codes[0], ((u32 *)to)[4 + lane % 4] = r.codes[1];
                    if (lane % 4 == 0) *(float4 *)(to + 2) = r.scale;
                }
            }
        }
        __syncthreads();
        float sum[N] = {};
        auto step = [&](const P &now, P &next) {
            const int block = chunk * P::CHUNK + own, to = warp + group;
            const uint4 *const from = room + place<N>(SUMS ? skipped + block : block);
            part++, chunk++;
            const bool ends = chunk == chunks || part == upto;
            if (ends) {
                chunk = 0, group++;
                if (part < upto) enter();
            }
            if (part < upto) load(next);
            now.add(sum, from, start + block);
            if (!ends) return;
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int by = P::DOWN; by < 32; by *= 2) sum[n] += __shfl_xor_sync(ALL_LANES, sum[n], by);
                if (lane < P::DOWN) parts[(to * N + n) * P::DOWN + lane] = sum[n];
                sum[n] = 0.0f;
            }
        };
        while (part < upto) {
            step(even, odd);
            if (part < upto) step(odd, even);
        }
        __syncthreads();
        each_own([&](int i) {
            const u32 of = i / SIZE * chunks;
            for (u32 w = of / (u32)of_warp; w <= (of + chunks - 1) / (u32)of_warp; w++) sums[i] += parts[w * SIZE + i];
        });
    }
    for (int i = threadIdx.x; i < results; i += blockDim.x) {
        const Group at(a, SUMS ? (u32)first / (u32)joined + i / SIZE : first + i / SIZE * joined);
        const Few::Product &made = a.product[at.which + (is_other ? 2 : 0)];
        const int n = i / P::DOWN % N;
        const i64 row = (i64)at.number * P::DOWN + i % P::DOWN;
        if (row >= made.rows || n >= a.tokens) continue;
        const float *total = sums + i / SIZE * joined * SIZE + i % SIZE;
        float result = total[0];
        if (SUMS) {
            result *= a.summed.share(entry, 0);
            for (int k = 1; k < joined; k++) result = fmaf(a.summed.share(entry, k), total[k * SIZE], result);
        } else if (a.unit) {
            result = gated(a.unit, total[0], total[SIZE]);
        }
        made.out[(entry * a.tokens + n) * made.out_step + row] = result;
    }
}
template <class F, int N, int ROWS = 0> __global__ void __launch_bounds__(512, 1) few(const __grid_constant__ Few a) {
    multiply<F, N, false, ROWS>(a);
}
template <class F> __global__ void __launch_bounds__(512, 1) summed(const __grid_constant__ Few a) { multiply<F, 1, true>(a); }
