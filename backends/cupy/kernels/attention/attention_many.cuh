// What kernels share that take many rows over keys and values of 16 bits: they are multiplied as they lie in the cache, by
// queries and weights that are rounded to the same type, once.  Sums, and all of the softmax, are float32.

// Tiles that are not hidden, of which 32 are looked up at once.
struct Coming {
    const i32 *seen;
    int at, step, tiles, first;
    u32 some, open;

    // The next tile, `tiles` or more if there is none; `is_open` says whether it is.
    __device__ __forceinline__ int next(bool &is_open) {
        while (some == 0) {
            if (at >= tiles) return tiles;
            const int mine = at + (int)(threadIdx.x % 32) * step, kind = mine >= tiles ? HIDDEN : seen ? seen[mine] : OPEN;
            some = __ballot_sync(ALL_LANES, kind != HIDDEN), open = __ballot_sync(ALL_LANES, kind == OPEN);
            first = at, at += 32 * step;
        }
        const int bit = __ffs((int)some) - 1;
        some &= some - 1, is_open = open >> bit & 1;
        return first + bit * step;
    }
};

// What a block has: a tile of rows, of which each warp has 16, and a key head; blocks are tiles (the last rows first: they
// see most keys), key heads times batches, splits.
template <class Cell, int KEYS, int OF_WARPS> struct Many {
    static constexpr int OF_ROWS = 16 * OF_WARPS, OF_THREADS = 32 * OF_WARPS;
    const Tiles &x;
    const Args &a;
    const int lane, warp, g, t, rows, group, batch, splits, number;
    const Cell *const keys, *const values;
    const float cap;
    float unit[2];  // what products with the two rows that this lane has are multiplied by

    __device__ __forceinline__ explicit Many(const Tiles &x)
        : x(x), a(x.a), lane(threadIdx.x % 32), warp(threadIdx.x / 32), g(lane / 4), t(lane % 4), rows(gridDim.x - 1 - blockIdx.x),
          group(blockIdx.y % (int)a.groups), batch(blockIdx.y / (int)a.groups), splits((int)a.splits), number(blockIdx.z),
          keys(a.k.cells<Cell>(batch, group)), values(a.v.cells<Cell>(batch, group)), cap((float)a.cap * LOG2_E), unit{0.0f, 0.0f} {}

    __device__ __forceinline__ Row row(int i) const { return row_of(a, batch, group, rows * OF_ROWS + i); }
    __device__ __forceinline__ Coming coming() const {
        const i32 *seen = x.seen ? x.seen + batch * x.seen_batch + group * x.seen_head + rows * x.tiles : nullptr;
        return {seen, number, splits, (int)x.tiles, 0, 0u, 0u};
    }
    // Rows of this warp as cells of D columns; `place` says of a row, and of the eight columns that this lane has, for which
    // tile they are.
    template <int D, class Place> __device__ __forceinline__ void take_queries(const Place &place) {
        constexpr int LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32;
        const float scale = (float)a.scale * (cap > 0.0f ? 1.0f : LOG2_E);
#pragma unroll 4
        for (int i = 0; i < 16; i += 32 / LANES) {
            const int mine = 16 * warp + i + lane / LANES, c = lane % LANES;
            const float u = split_row<Cell, 1, 1>(query_of(a, batch, row(mine)), a.q.column, x.dense, (int)a.size, LANES, c, D, mine, place(mine, c), 0, true);
            for (int r = 0; r < 2; r++) {
                const int at = g + 8 * r - i;
                const float got = __shfl_sync(ALL_LANES, u, (at * LANES) & 31);
                if (at >= 0 && at < 32 / LANES) unit[r] = got * scale;
            }
        }
    }
    __device__ __forceinline__ void note_biases(Bias *biases) const {
        if (threadIdx.x < OF_ROWS) biases[threadIdx.x] = bias_of(a, batch, row(threadIdx.x));
    }
    // Brings a tile whose rows of PITCH numbers have 64 columns, and those 64 further APART numbers behind.  Keys past the last
    // one are the last one again.  Eight lanes bring a row.
    template <int COLUMNS, int PITCH, int APART>
    __device__ __forceinline__ void fetch(u16 *tile, const Cell *from, const View &by, int first, int there) const {
        constexpr int BELOW = OF_THREADS / 8;
        const int sub = threadIdx.x % 8, begin = threadIdx.x / 8, last_key = (int)a.keys - 1;
        if (x.vectors && first + KEYS <= a.keys && there == COLUMNS) {
            const Cell *cells = from + (first + begin) * by.row + 8 * sub;
            u16 *to = tile + chunk(begin, sub, PITCH);
#pragma unroll
            for (int i = 0; i < KEYS; i += BELOW, cells += BELOW * by.row)
#pragma unroll
                for (int c = 0; c < COLUMNS / 64; c++) cp_async_16(to + i * PITCH + c * APART, cells + 64 * c);
            return;
        }
#pragma unroll 1
        for (int row = begin; row < KEYS; row += BELOW) {
            const Cell *cells = from + min(first + row, last_key) * by.row;
            u16 *to = tile + chunk(row, sub, PITCH);
            if (x.vectors) {
#pragma unroll
                for (int c = 0; c < COLUMNS / 64; c++)
                    if (8 * sub + 64 * c < there) cp_async_16(to + c * APART, cells + 8 * sub + 64 * c);
            } else {
#pragma unroll 1
                for (int i = 0; i < COLUMNS / 8; i++) {
                    const int column = 8 * sub + i / 8 * 64 + i % 8;
                    to[i / 8 * APART + i % 8] = column < there ? cells[column * by.column].bits : (u16)0;
                }
            }
        }
    }
    // Sums of products become weights; sums of values are to be multiplied by `fade`.
    __device__ __forceinline__ void weigh(float (*s)[4], Powers<KEYS, false, 0> &powers, float *fade, const Bias *biases, int first, bool open) const {
        const Bias *added = open && first + KEYS <= a.keys ? nullptr : biases + 16 * warp + g;
        float by[2] = {unit[0], unit[1]};
        if (cap > 0.0f || added || unit[0] < 0.0f) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                float &score = s[i / 4][i % 4];
                score *= unit[i % 4 / 2];
                if (cap > 0.0f) score = cap * tanhf(score);
            }
            if (added) {
                const Bias bias[2] = {added[0], added[8]};
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                    if (i % 16 == 0) __syncwarp();  // few loads at once, for which there are registers
                    s[i / 4][i % 4] += LOG2_E * bias_at(a, bias[i % 4 / 2], first + i / 4 * 8 + 2 * t + i % 2);
                }
            }
            by[0] = by[1] = 1.0f;
        }
        powers.take(s, fade, by);
    }
    template <int E> static __device__ __forceinline__ void fade_all(float (*sums)[4], const float *fade) {
        if (__any_sync(ALL_LANES, fade[0] < 1.0f || fade[1] < 1.0f))
#pragma unroll
            for (int e = 0; e < E / 2; e++) sums[e / 4][e % 4] *= fade[e % 4 / 2];
    }
    // The weights of 16 keys as cells.
    static __device__ __forceinline__ void pack(const float (*s)[4], u32 *cells) {
#pragma unroll
        for (int i = 0; i < 4; i++) cells[i] = Pair<Cell>::pack(s[i / 2][2 * (i % 2)], s[i / 2][2 * (i % 2) + 1]);
    }
    template <int E> __device__ __forceinline__ void store(const float (*sums)[4], Powers<KEYS, false, 0> &powers) const {
        const int width = (int)a.width;
        powers.join();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const Row row = this->row(16 * warp + g + 8 * r);
            const float top = powers.top[r] / LOG2_E, share = splits > 1 ? 1.0f : share_of(a, row.head, top, powers.sum[r]);
            float *target = target_of(a, batch, row, number);
            if (!row.real) continue;
#pragma unroll
            for (int e = 0; e < E / 8; e++) {
                const int c = 8 * e + 2 * t;
                const float one = sums[e][2 * r] * share, two = sums[e][2 * r + 1] * share;
                if (width % 2 == 0 && (u64)target % 8 == 0) {
                    if (c < width) *(float2 *)(target + c) = make_float2(one, two);
                } else {
                    if (c < width) target[c] = one;
                    if (c + 1 < width) target[c + 1] = two;
                }
            }
            if (splits > 1 && t == 0) keep_state(a, row, number, top, powers.sum[r]);
        }
    }
};
