// The gated delta rule C tokens at a time on tensor cores, for long prompts.  For one chunk and one value head, with G
// the log decays summed from the chunk's first token:
//     L = strict lower part of beta_r (k_r.k_s) e^(G_r - G_s),   X = (I + L)^-1 diag(beta),
//     P = lower part of (q_r.k_s) e^(G_r - G_s) / sqrt(d)
//     U = X (V - e^G K S),   O = e^G Q S / sqrt(d) + P U,   S = e^(G_last) S + (e^(G_last - G) K)^T U
// `delta_prepare` and `delta_prepare_channels` compute all that needs no state, for all chunks at once; `delta_scan`
// carries the state.  No exponent is ever positive.  Operands of products are bfloat16; in exact mode each is the sum of
// two, and a product is three.  A decay per channel (KDA) enters K and Q themselves, otherwise it scales rows.

// Tiles are kept as the scan wants them in shared memory: rows of UNITS 16-byte units, shuffled so that one unit of eight
// rows lies in all banks.
template <int UNITS>
__device__ __forceinline__ int place(int row, int unit) {
    return (row * UNITS + (unit ^ (UNITS >= 8 ? row & 7 : row >> 2 & 1))) * 16;
}

// Squares over the tokens of a chunk are kept as tiles of 16 x 16, of which there are those on and below the diagonal.
constexpr int BLOCK = 16 * 16 * 2;
__device__ __forceinline__ constexpr int below(int row, int column) { return (row * (row + 1) / 2 + column) * BLOCK; }

// What is prepared of a chunk, in bytes.  Of a key head (of a value head, if it decays by channel): K, Q and what of K
// the state receives.  Of a value head: X, P, and factors: e^G and e^(G_last - G) by row, or e^(G_last) by channel.
template <int D, int C, bool CHANNELS, bool EXACT>
struct Record {
    static constexpr int PARTS = EXACT ? 2 : 1, TILE = 2 * C * D, SQUARE = below(C / 16, 0);
    static constexpr int Q = PARTS * TILE, RECEIVED = CHANNELS ? 2 * Q : 0, KEYS = (CHANNELS ? 3 : 2) * Q;
    static constexpr int P = PARTS * SQUARE, FACTORS = 2 * P, HEADS = FACTORS + 4 * (CHANNELS ? D : 2 * C);
};

template <bool EXACT>
__device__ __forceinline__ void split(float x, float y, u32 &hi, u32 &lo) {
    hi = pack_bf16(x, y);
    if (EXACT) lo = pack_bf16(x - __uint_as_float(hi << 16), y - __uint_as_float(hi & 0xffff0000u));
}

// Part `hi` (and `lo`) of a 16 x 16 operand on the left of a product.
struct Left {
    u32 hi[4], lo[4];
};

// Of two neighbouring 16 x 8 accumulators: their lanes hold just what the left operand wants.
template <bool EXACT>
__device__ __forceinline__ Left left_of(const float (&x)[4], const float (&y)[4]) {
    Left f;
    split<EXACT>(x[0], x[1], f.hi[0], f.lo[0]);
    split<EXACT>(x[2], x[3], f.hi[1], f.lo[1]);
    split<EXACT>(y[0], y[1], f.hi[2], f.lo[2]);
    split<EXACT>(y[2], y[3], f.hi[3], f.lo[3]);
    return f;
}

// Two 16 x 8 accumulators += f x two right operands, whose parts are `hi` and `lo`: registers 0, 1 and 2, 3.
template <bool EXACT>
__device__ __forceinline__ void multiply(float (&x)[4], float (&y)[4], const Left &f, const u32 (&hi)[4],
                                         const u32 (&lo)[4]) {
    const u32 x_hi[2] = {hi[0], hi[1]}, y_hi[2] = {hi[2], hi[3]}, x_lo[2] = {lo[0], lo[1]}, y_lo[2] = {lo[2], lo[3]};
    if (EXACT) {
        mma_bf16(x, f.hi, x_lo);
        mma_bf16(y, f.hi, y_lo);
        mma_bf16(x, f.lo, x_hi);
        mma_bf16(y, f.lo, y_hi);
    }
    mma_bf16(x, f.hi, x_hi);
    mma_bf16(y, f.hi, y_hi);
}

// Where a lane reads for `ldmatrix` of an operand of 16 x 16 that begins at a row of a tile and an element of it: of a
// right one whose columns are rows of the tile; of a right one whose rows are, which are summed over, or of a left one.
template <int UNITS>
__device__ __forceinline__ int by_rows(int row, int at) {
    const int lane = threadIdx.x % 32;
    return place<UNITS>(row + lane / 16 * 8 + lane % 8, at / 8 + lane / 8 % 2);
}
template <int UNITS>
__device__ __forceinline__ int by_columns(int row, int at) {
    const int lane = threadIdx.x % 32;
    return place<UNITS>(row + lane % 16, at / 8 + lane / 16);
}

// The same with right operands from a tile, whose lower part lies `part` bytes behind: by its rows, and by its columns.
template <bool EXACT>
__device__ __forceinline__ void multiply_rows(float (&x)[4], float (&y)[4], const Left &f, const char *from, int part) {
    u32 hi[4], lo[4] = {};
    ldmatrix_x4(hi, from);
    if (EXACT) ldmatrix_x4(lo, from + part);
    multiply<EXACT>(x, y, f, hi, lo);
}
template <bool EXACT>
__device__ __forceinline__ void multiply_columns(float (&x)[4], float (&y)[4], const Left &f, const char *from, int part) {
    u32 hi[4], lo[4] = {};
    ldmatrix_x4_trans(hi, from);
    if (EXACT) ldmatrix_x4_trans(lo, from + part);
    multiply<EXACT>(x, y, f, hi, lo);
}

// A left operand of 16 x 16 from a tile.
template <bool EXACT>
__device__ __forceinline__ Left left_from(const char *from, int part) {
    Left f;
    ldmatrix_x4(f.hi, from);
    if (EXACT) ldmatrix_x4(f.lo, from + part);
    return f;
}

template <int N>
__device__ __forceinline__ void clear(float (&x)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0;
}
