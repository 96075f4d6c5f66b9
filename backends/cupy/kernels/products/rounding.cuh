// Activations that packed weights are multiplied with are rounded to 8 bits in blocks of 32, products of codes are exact
// integers, and scales are applied in float32, so that the number of tokens changes no more than the order of a sum.
//
// Integer sums start at MAGIC_BITS: their bits, read as a float, are MAGIC + sum, exactly.  Scales d of activations have 21
// significant bits, so that MAGIC d is exact as well and one fma(MAGIC + sum, d, -MAGIC d) is d sum, rounded once.
constexpr i32 MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

struct Rounded {
    u32 codes[2];  // of columns 4 t ... and 16 + 4 t ...
    float4 scale;  // d, -MAGIC d, d times the sum of the 32 codes, and of the first 16
};
// A block of 32 in 4 lanes, of which number t has columns 4 t ... and 16 + 4 t ...; infinities and NaN end in d.
__device__ __forceinline__ Rounded round_block(const float4 (&x)[2]) {
    const float v[2][4] = {{x[0].x, x[0].y, x[0].z, x[0].w}, {x[1].x, x[1].y, x[1].z, x[1].w}};
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) top = max(top, __float_as_uint(v[i / 4][i % 4]) & 0x7fffffffu);
    top = max(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = max(top, __shfl_xor_sync(ALL_LANES, top, 2));
    const float d = __uint_as_float(__float_as_uint(__uint_as_float(top) * (1.0f / 127.0f)) & ~7u);
    const float up = d < 1e-37f ? 18446744073709551616.0f : 1.0f;  // the inverse of less is no number
    const float inverse = d > 0.0f ? 1.0f / (d * up) : 0.0f;
    Rounded r;
    i32 sum[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 code[4];
#pragma unroll
        for (int i = 0; i < 4; i++) code[i] = __float_as_uint(fmaf(v[h][i] * up, inverse, MAGIC));  // its lowest byte
        r.codes[h] = __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
        sum[h] = dp4a(r.codes[h], 0x01010101, 0);
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 1);
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 2);
    }
    r.scale = make_float4(d, -MAGIC * d, d * (sum[0] + sum[1]), d * sum[0]);
    return r;
}
// Lane l brings what it has of block `block` + l / 4 of a row; a block past the last is 0.
__device__ __forceinline__ void bring(float4 (&x)[2], const float *row, int block, int blocks) {
    const int mine = block + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    x[0] = x[1] = make_float4(0, 0, 0, 0);
    if (mine >= blocks) return;
    const float *from = row + 32 * (i64)mine + 4 * t;
    if (((u64)row & 15) == 0) {
        x[0] = *(const float4 *)from, x[1] = *(const float4 *)(from + 16);
    } else {
        x[0] = make_float4(from[0], from[1], from[2], from[3]);
        x[1] = make_float4(from[16], from[17], from[18], from[19]);
    }
}
