// Products with weights that are kept as floats, whose rows are dense: few tokens with vector loads, many on tensor cores.

// ------------------------------------------------------------------------------------------------------ few tokens

// 16 bytes of a row as floats.
template <class T> struct Piece;
template <> struct Piece<float> {
    static constexpr int SIZE = 4;
    static __device__ __forceinline__ void load(float *to, const float *from) {
        const float4 v = load_stream((const float4 *)from);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
};
template <class T> struct Piece {
    static constexpr int SIZE = 8;
    static __device__ __forceinline__ void load(float *to, const T *from) {
        const uint4 v = load_stream((const uint4 *)from);
        const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++) to[i] = to_float(T{(u16)(pairs[i / 2] >> 16 * (i % 2))});
    }
};

template <class T> struct Few {
    struct Product {
        const T *w;
        float *out;
        i64 first, rows, matrix_step, row_step, out_step;  // the first of its blocks
    } product[MOST_PRODUCTS];
    i64 products, unit;  // a unit has two products, and makes one result of them
    const float *x;
    i64 columns, tokens, x_step;  // `tokens` rows of x for each entry
    i64 used, shared;
    Choice choice;
};
// A warp has two rows, of a gated unit one of each product, and all their columns: it asks for 1 KiB of 16-bit weights at a time, 4 times unrolled, and multiplies
// 1024 of them in some 70 instructions at one token.
constexpr int OWN = 2;
template <class T, int N> __global__ void __launch_bounds__(256) few(const __grid_constant__ Few<T> a) {
    constexpr int SIZE = Piece<T>::SIZE;
    const int lane = threadIdx.x % 32;
    const i64 entry = blockIdx.y, matrix = a.choice.matrix_of(entry);
    if (blockIdx.x == 0 && threadIdx.x == 0) a.choice.check(entry);
    int which = 0;
    if (!a.unit)
        while (which + 1 < a.products && blockIdx.x >= a.product[which + 1].first) which++;
    const auto &made = a.product[which];
    const i64 first = ((blockIdx.x - made.first) * 8 + threadIdx.x / 32) * (a.unit ? 1 : OWN);
    if (first >= made.rows) return;  // a whole warp
    const T *w[OWN];
    const float *x[N];
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        const auto &p = a.product[a.unit ? r : which];
        w[r] = p.w + max(matrix, (i64)0) * p.matrix_step + min(first + (a.unit ? 0 : r), p.rows - 1) * p.row_step;
    }
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = a.x + (row_of(entry, a.used, a.shared) * a.tokens + min((i64)n, a.tokens - 1)) * a.x_step;
    const bool aligned = (((u64)w[0] | (u64)w[1] | (u64)x[0] | (u64)(a.x_step * 4)) & 15) == 0;
    const i64 end = matrix < 0 ? 0 : a.columns, pieces = aligned ? end / SIZE * SIZE : 0;
    float sum[OWN][N] = {};
#pragma unroll(N > 2 ? 2 : 4)
    for (i64 c = lane * SIZE; c < pieces; c += 32 * SIZE) {
        float v[OWN][SIZE];
#pragma unroll
        for (int r = 0; r < OWN; r++) Piece<T>::load(v[r], w[r] + c);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < SIZE; i += 4) {
                const float4 u = *(const float4 *)(x[n] + c + i);
#pragma unroll
                for (int r = 0; r < OWN; r++)
                    sum[r][n] = fmaf(v[r][i + 3], u.w, fmaf(v[r][i + 2], u.z, fmaf(v[r][i + 1], u.y, fmaf(v[r][i], u.x, sum[r][n]))));
            }
    }
    for (i64 c = pieces + lane; c < end; c += 32)
#pragma unroll
        for (int r = 0; r < OWN; r++)
#pragma unroll
            for (int n = 0; n < N; n++) sum[r][n] = fmaf(to_float(w[r][c]), x[n][c], sum[r][n]);
#pragma unroll
    for (int n = 0; n < N; n++) {
        float total[OWN];
#pragma unroll
        for (int r = 0; r < OWN; r++) total[r] = warp_sum(sum[r][n]);
        if (lane > 0 || n >= a.tokens) continue;
        float *out = made.out + (entry * a.tokens + n) * made.out_step + first;
        if (a.unit)
            out[0] = gated(a.unit, total[0], total[1]);
        else
#pragma unroll
            for (int r = 0; r < OWN; r++)
                if (first + r < made.rows) out[r] = total[r];
    }
}

// ----------------------------------------------------------------------------------------------------- many tokens

template <class T> struct Many {
    const T *w;
    const float *x;
    float *out;
    i64 columns, rows, matrix_step, row_step, x_step, out_step;
    const int4 *tiles;
    const i32 *order;
    i64 used, shared;
};
// Numbers as sums of bfloat16 ones: of x the first two terms, 16 bits; a weight is one term, which is as it was loaded, or
// two if it is half.  What is left out is 2^-17 of a product.
__device__ __forceinline__ u32 split(float &x, float &y) {
    const u32 high = pack_bf16(x, y);
    x -= __uint_as_float(high << 16), y -= __uint_as_float(high & 0xffff0000u);
    return high;
}
template <class T> struct Terms {
    static constexpr int OF_W = 2;
};
template <> struct Terms<bf16_bits> {
    static constexpr int OF_W = 1;
};
constexpr int TILE = 64, DEPTH = 32, PITCH = DEPTH + 8;  // rows of 80 bytes: eight of them lie in different banks
__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
template <class T> __device__ __forceinline__ u32 bits_of(T x) { return x.bits; }
// Half a row of a stage, 16 columns, in registers of the thread that brings it, as it was loaded: whoever converts a number
// waits for it.
template <class T> struct Half {
    static constexpr int WORDS = 4 * sizeof(T);
    u32 words[WORDS];
    __device__ __forceinline__ void load(const T *row, i64 column, i64 columns, bool aligned) {
        if (aligned && column + 16 <= columns) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 v = load_stream((const uint4 *)(row + column) + i / 4);
                words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 bits = column + i < columns ? bits_of(row[column + i]) : 0;
            u32 &word = words[i * WORDS / 16];
            word = WORDS < 16 && i % 2 ? word | bits << 16 : bits;
        }
    }
    __device__ __forceinline__ float at(int i) const {
        if constexpr (WORDS == 16)
            return __uint_as_float(words[i]);
        else
            return to_float(T{(u16)(words[i / 2] >> 16 * (i % 2))});
    }
    template <int TERMS> __device__ __forceinline__ void store(u16 (*to)[TILE][PITCH], int row, int column) const {
        float v[16];
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = at(i);
#pragma unroll
        for (int term = 0; term < TERMS; term++)
#pragma unroll
            for (int i = 0; i < 16; i += 8) {
                uint4 x = {words[i / 2 % WORDS], words[(i / 2 + 1) % WORDS], words[(i / 2 + 2) % WORDS], words[(i / 2 + 3) % WORDS]};
                if (TERMS > 1) {
                    x.x = split(v[i], v[i + 1]), x.y = split(v[i + 2], v[i + 3]);
                    x.z = split(v[i + 4], v[i + 5]), x.w = split(v[i + 6], v[i + 7]);
                }
                *(uint4 *)&to[term][row][column + i] = x;
            }
    }
};
// 64 rows by 64 entries; each of four warps has 32 x 32.
template <class T> __global__ void __launch_bounds__(128) many(const __grid_constant__ Many<T> a) {
    constexpr int OF_W = Terms<T>::OF_W;
    SHARED(ws, u16[OF_W][TILE][PITCH]);
    SHARED(xs, u16[2][TILE][PITCH]);
    SHARED(slots, i32[TILE]);
    const int4 tile = a.tiles[blockIdx.y];
    if (tile.z == 0) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp_r = threadIdx.x / 64, warp_e = threadIdx.x / 32 % 2;
    const i64 first = (i64)blockIdx.x * TILE;
    if (threadIdx.x < TILE) {
        const int entry = tile.y + min((int)threadIdx.x, tile.z - 1);
        slots[threadIdx.x] = a.order ? a.order[entry] : entry;
    }
    __syncthreads();
    float sum[2][4][4] = {};
    if (tile.x >= 0) {
        const int mine = threadIdx.x / 2, column = threadIdx.x % 2 * 16;
        const T *w = a.w + tile.x * a.matrix_step + min(first + mine, a.rows - 1) * a.row_step;
        const float *x = a.x + row_of(slots[mine], a.used, a.shared) * a.x_step;
        const bool w_aligned = ((u64)w & 15) == 0, x_aligned = ((u64)x & 15) == 0;
        Half<T> next_w;
        Half<float> next_x;
        next_w.load(w, column, a.columns, w_aligned);
        next_x.load(x, column, a.columns, x_aligned);
        for (i64 start = 0; start < a.columns; start += DEPTH) {
            next_w.template store<OF_W>(ws, mine, column);
            next_x.template store<2>(xs, mine, column);
            __syncthreads();
            if (start + DEPTH < a.columns) {
                next_w.load(w, start + DEPTH + column, a.columns, w_aligned);
                next_x.load(x, start + DEPTH + column, a.columns, x_aligned);
            }
#pragma unroll
            for (int k = 0; k < DEPTH; k += 16) {
                u32 wf[OF_W][2][4], xf[2][2][4];
#pragma unroll
                for (int term = 0; term < OF_W; term++)
#pragma unroll
                    for (int r = 0; r < 2; r++)
                        ldmatrix_x4(wf[term][r], &ws[term][32 * warp_r + 16 * r + lane % 16][k + lane / 16 * 8]);
#pragma unroll
                for (int term = 0; term < 2; term++)
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        ldmatrix_x4(xf[term][j], &xs[term][32 * warp_e + 16 * j + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
                // Small terms first.
#pragma unroll
                for (int term = OF_W; term >= 0; term--)
#pragma unroll
                    for (int r = 0; r < 2; r++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            mma_bf16(sum[r][j], wf[term == 2 ? 1 : 0][r], xf[term == 1 ? 1 : 0][j / 2] + j % 2 * 2);
            }
            __syncthreads();
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = i / 16, j = i / 4 % 4, e = i % 4, entry = 32 * warp_e + 8 * j + 2 * t + e % 2;
        const i64 row = first + 32 * warp_r + 16 * r + g + 8 * (e / 2);
        if (entry < tile.z && row < a.rows) a.out[slots[entry] * a.out_step + row] = sum[r][j][e];
    }
}
