// Products of few tokens with weights that are kept as floats, whose rows are dense.

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
    i64 parts;           // warps that share the columns of their rows out: 1, 2, 4 or 8
    const float *x;
    i64 columns, tokens, x_step;  // `tokens` rows of x for each entry
    i64 used, shared;
    Choice choice;
    i64 chosen;     // entries; those behind them are of one more expert, whose unit is of products 2 and 3
    Summed summed;  // its other expert is that of product 1
    Prologue::Words prologue;
    Epilogue::Words epilogue;
};
// A warp has two rows, of a gated unit one of each product, and all their columns: it asks for 1 KiB of 16-bit weights at a time, 4 times unrolled, and multiplies
// 1024 of them in some 70 instructions at one token.
constexpr int OWN = 2;
// Where x is computed, blocks are few and large, since each of them computes all of it; sums of a row take so many threads.
constexpr int WARPS = Prologue::COMPUTES ? 16 : 8;
// Adds the products of the piece of OWN rows of w that begins at column c with N rows of x.
template <class T, int N>
__device__ __forceinline__ void add_piece(float (&sum)[OWN][N], const T *const (&w)[OWN], const float *const (&x)[N], i64 c) {
    constexpr int SIZE = Piece<T>::SIZE;
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
// Computes the rows of x for all warps of a block: they lie densely at `rows`.  One block writes what others read.
template <class T, int N> __device__ __forceinline__ void compute_rows(const Few<T> &a, float4 *rows) {
    const int columns = (int)a.columns, blocks = columns / 32, tokens = (int)a.tokens, lane = threadIdx.x % 32, eights = (blocks + 7) / 8;
    float *numbers = (float *)rows + N * columns;
    if (Prologue::NUMBERS > 0) {
        for (int n = 0; n < tokens; n++)
            Prologue::reduce(a.prologue, n, columns, numbers + n * Prologue::NUMBERS, numbers + N * Prologue::NUMBERS);
        __syncthreads();
    }
    for (int eight = threadIdx.x / 32; eight < tokens * eights; eight += WARPS) {
        const int n = eight / eights, block = eight % eights * 8, mine = block + lane / 4;
        float4 brought[2];
        Prologue::bring(a.prologue, numbers + n * Prologue::NUMBERS, brought, n, columns, block, blocks, blockIdx.x == 0);
        float4 *to = rows + (n * blocks + mine) * 8 + lane % 4;
        if (mine < blocks) to[0] = brought[0], to[4] = brought[1];
    }
    __syncthreads();
}
// Some warps return early: `rows` is free when all have come back.
template <class T, int N> __device__ __forceinline__ void multiply(const Few<T> &a, float4 *rows) {
    constexpr int SIZE = Piece<T>::SIZE;
    SHARED(room, float[WARPS][N][OWN]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = (int)a.parts, own = warp % parts * 32 + lane;
    const bool is_other = N == 1 && blockIdx.y >= a.chosen;  // an entry of experts is a row
    const i64 entry = is_other ? blockIdx.y - a.chosen : blockIdx.y;
    i64 matrix = 0;
    if (a.choice.ids && !is_other) {
        wait_for_earlier();
        if (blockIdx.x == 0 && threadIdx.x == 0) a.choice.check(entry);
        matrix = a.choice.matrix_of(entry);
    }
    int which = is_other ? 2 : 0;
    if (!a.unit)
        while (which + 1 < a.products && blockIdx.x >= a.product[which + 1].first) which++;
    const auto &made = a.product[which];
    const i64 first = ((blockIdx.x - made.first) * (WARPS / parts) + warp / parts) * (a.unit ? 1 : OWN);
    const bool real = first < made.rows;
    if (!Prologue::COMPUTES && !real && parts == 1) return;  // a whole warp; others come to the barrier
    const T *w[OWN];
    const float *x[N];
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        const auto &p = a.product[a.unit ? which + r : which];
        w[r] = p.w + max(matrix, (i64)0) * p.matrix_step + min(first + (a.unit ? 0 : r), p.rows - 1) * p.row_step;
        const i64 line = own * (LINE / (i64)sizeof(T));
        if (matrix >= 0 && line < a.columns) prefetch(w[r] + line);
    }
    wait_for_earlier();
#pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = a.x + ((is_other ? entry : row_of(entry, a.used, a.shared)) * a.tokens + min((i64)n, a.tokens - 1)) * a.x_step;
    if (Prologue::COMPUTES) {
        compute_rows<T, N>(a, rows);
        if (!real && parts == 1) return;
        for (int n = 0; n < N; n++) x[n] = (const float *)rows + min(n, (int)a.tokens - 1) * (int)a.columns;
    }
    const bool aligned = (((u64)w[0] | (u64)w[1] | (u64)x[0] | (u64)(a.x_step * 4)) & 15) == 0;
    const i64 end = matrix < 0 ? 0 : a.columns, pieces = aligned ? end / SIZE * SIZE : 0;
    float sum[OWN][N] = {};
#pragma unroll(N > 2 ? 2 : 4)
    for (i64 c = own * SIZE; c < pieces; c += parts * 32 * SIZE) add_piece(sum, w, x, c);
    for (i64 c = pieces + own; c < end; c += parts * 32)
#pragma unroll
        for (int r = 0; r < OWN; r++)
#pragma unroll
            for (int n = 0; n < N; n++) sum[r][n] = fmaf(to_float(w[r][c]), x[n][c], sum[r][n]);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < OWN; r++) sum[r][n] = warp_sum(sum[r][n]);
    if (parts > 1) {
        if (lane == 0)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int r = 0; r < OWN; r++) room[warp][n][r] = sum[r][n];
        __syncthreads();
        if (warp % parts > 0 || !real) return;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int r = 0; r < OWN; r++)
                for (int i = 1; i < parts; i++) sum[r][n] += room[warp + i][n][r];
    }
    if (lane > 0) return;
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (n >= a.tokens) break;
        float *out = made.out + (entry * a.tokens + n) * made.out_step + first;
        if (a.unit)
            out[0] = gated(a.unit, sum[0][n], sum[1][n]);
        else
#pragma unroll
            for (int r = 0; r < OWN; r++)
                if (first + r < made.rows) out[r] = sum[r][n];
    }
}
template <class T, int N>
__global__ void __launch_bounds__(32 * WARPS, Prologue::COMPUTES || Epilogue::READS ? 1 : N > 1 ? 2 : 4) few(const __grid_constant__ Few<T> a) {
    DYNAMIC_SHARED(rows, float4);
    multiply<T, N>(a, rows);
    Epilogue::finish(a.epilogue, (float *)rows);
}
// OWN rows of the sum of a token's entries, by a block whose warps share the entries out.
template <class T> __global__ void __launch_bounds__(384, 2) summed(const __grid_constant__ Few<T> a) {
    wait_for_earlier();
    constexpr int SIZE = Piece<T>::SIZE;
    SHARED(room, float[12][OWN]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, used = (int)a.summed.used;
    const i64 token = blockIdx.y, first = (i64)blockIdx.x * OWN;
    if (blockIdx.x == 0 && (int)threadIdx.x < used) a.choice.check(token * used + threadIdx.x);
    float result[OWN] = {};
    for (int entry = warp; entry < a.summed.entries(); entry += warps) {
        const bool chosen = entry < used;
        const auto &p = a.product[chosen ? 0 : 1];
        const i64 matrix = chosen ? a.choice.matrix_of(token * used + entry) : 0;
        if (matrix < 0) continue;
        const float *const x[1] = {chosen ? a.x + (token * used + entry) * a.x_step : a.summed.x + token * a.summed.x_step};
        const T *w[OWN];
#pragma unroll
        for (int r = 0; r < OWN; r++) w[r] = p.w + matrix * p.matrix_step + min(first + r, p.rows - 1) * p.row_step;
        const bool aligned = (((u64)w[0] | (u64)w[1] | (u64)x[0]) & 15) == 0;
        const i64 pieces = aligned ? a.columns / SIZE * SIZE : 0;
        float sum[OWN][1] = {};
#pragma unroll 2
        for (i64 c = lane * SIZE; c < pieces; c += 32 * SIZE) add_piece(sum, w, x, c);
        for (i64 c = pieces + lane; c < a.columns; c += 32)
            for (int r = 0; r < OWN; r++) sum[r][0] = fmaf(to_float(w[r][c]), x[0][c], sum[r][0]);
        const float share = a.summed.share(token, entry);
#pragma unroll
        for (int r = 0; r < OWN; r++) result[r] = fmaf(share, warp_sum(sum[r][0]), result[r]);
    }
    if (lane == 0)
        for (int r = 0; r < OWN; r++) room[warp][r] = result[r];
    __syncthreads();
    if (threadIdx.x >= OWN || first + threadIdx.x >= a.product[0].rows) return;
    float total = 0.0f;
    for (int w = 0; w < warps; w++) total += room[w][threadIdx.x];
    a.product[0].out[token * a.product[0].out_step + first + threadIdx.x] = total;
}
