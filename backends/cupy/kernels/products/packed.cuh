// Packed weights: what kernels need to know of each quantised type.  binding/weight_packing.py lays them out; coded.cuh has
// the types with code books.
//
// Rows lie in units of 32, columns in blocks of 32; a thread of 32 has a row.  A unit takes the bytes that its rows take
// in a file: first a plane of the codes' LOW bits, then one of their HIGH bits, [block][row] of 4 LOW and 4 HIGH bytes, then
// the records, [record][row], which hold the scales of SUPER blocks.  (Of 8 bits the plane is [block][half][row] of 16.)
// Types with bits that fill no words have them before the records, [super-block][row] of EXTRA bytes.
//
// The 32 codes of a row and block are 8 registers of 4 bytes: register 2 t + h has columns 16 h + 4 t to 16 h + 4 t + 3,
// which is what lane t of a fragment of mma_s8 holds in half h.  A plane of W bits keeps register r in bits
// W (r % (8 / W)) ... of all bytes of word r W / 8.
//
// Every weight is scale * code + bias.  Codes are signed bytes without a bias, or unsigned with one.  Signed ones of fewer
// bits stand at the upper end of their byte, so that they need no extension, and their scales are divided by 2^UP.

struct Codes {  // of a row and block, as lane t of four sees them
    u32 low[2], high, extra;
    int t;
};
// Most types have codes without extra bits, a code book in shared memory or a factor of the scale among the codes.
struct Plain {
    static constexpr int EXTRA = 0, BOOK = 0;  // bytes of a row and super-block; entries
    static constexpr bool SCALED = false;
    static __device__ __forceinline__ u32 extra(const u8 *, int) { return 0; }  // of a row, and a block of its super-block
    static __device__ __forceinline__ float factor(const Codes &) { return 1.0f; }
    static __device__ __forceinline__ void load_book() {}
    // Of a word of a plane of W bits, where lane t begins.
    template <int W> static __device__ __forceinline__ u32 window(u32 word, int t) { return word >> W * (2 * t % (8 / W)); }
};

// Bits W `at` ... of each byte, moved to bit `to`.
template <int W> __device__ __forceinline__ u32 field(u32 word, int at, int to) {
    const int by = to - W * at;
    return (by >= 0 ? word << by : word >> -by) & 0x01010101u * ((1u << W) - 1) << to;
}
// Linear codes; `half` is known when this is compiled.
template <int LOW_, int HIGH_, bool SIGNED> struct Linear : Plain {
    static constexpr int LOW = LOW_, HIGH = HIGH_, UP = SIGNED ? 8 - LOW - HIGH : 0;
    static __device__ __forceinline__ u32 codes(const Codes &c, int half) {
        if (LOW == 8) return c.low[half];
        u32 found = field<LOW>(c.low[0], half, UP);
        if (HIGH) found |= field<HIGH == 0 ? 1 : HIGH>(c.high, half, UP + LOW);
        return found;
    }
};
// Codes through a book of 16 bytes.  Its 4 codes of a half stand side by side, as __byte_perm wants its selectors.
template <u32 A, u32 B, u32 C, u32 D> struct Book : Plain {
    static constexpr int LOW = 4, HIGH = 0, UP = 0;
    static __device__ __forceinline__ u32 codes(const Codes &c, int half) {
        const u32 s = c.low[0] >> 16 * half, first = __byte_perm(A, B, s & 0x7777), second = __byte_perm(C, D, s & 0x7777);
        return __byte_perm(first, second, 0x3210 | (s >> 1 & 0x4444));
    }
};
using Nonlinear = Book<0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u>;
using TwiceE2M1 = Book<0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu>;
// TQ1_0: digits of base 3.  A byte has five digits of a column each, as 256/243 of their number, so that times 3 the upper
// byte of 16 bits is the first digit and the lower byte has the others.  A word has registers 0 to 4; two extra bytes have
// two digits of 5, 6 and 7 in turn, but for the last two columns, which are 2 bits each.
struct Ternary : Plain {
    static constexpr int LOW = 1, HIGH = 0, UP = 0, EXTRA = 20;
    template <int W> static __device__ __forceinline__ u32 window(u32 word, int) { return word; }
    static __device__ __forceinline__ u32 extra(const u8 *at, int block) {
        return ((const u16 *)at)[block] | (u32)(at[16 + block / 2] >> 4 * (block % 2) & 15) << 16;
    }
    // Digit `i` of the bytes of a word.
    static __device__ __forceinline__ u32 digits(u32 word, int i) {
        const u32 power = (i & 1 ? 3 : 1) * (i & 2 ? 9 : 1) * (i & 4 ? 81 : 1), bytes = 0x00ff00ffu;
        const u32 even = ((word & bytes) * power & bytes) * 3, odd = ((word >> 8 & bytes) * power & bytes) * 3;
        return (even >> 8 & 0x00030003u) | (odd & 0x03000300u);
    }
    static __device__ __forceinline__ u32 codes(const Codes &c, int half) {
        const int i = 2 * c.t + half;
        if (i < 5) return digits(c.low[0], i);
        const u32 first = c.extra & 0xffff, next = ((first & 0xff) * 3 & 0xff) | ((first >> 8) * 3 & 0xff) << 8;
        const u32 found = digits(first | next << 16, 2 * (i - 5));
        return i < 7 ? found : (found & 0xffff) | (c.extra & 0x30000) | (c.extra & 0xc0000) << 6;
    }
};

// ------------------------------------------------------------------------------------------------------ records

struct Scales {  // of the two halves of a block, if they differ; else of both
    float scale[2], bias[2];
};
// Record `i` of `count`, of which the parts before this one take `before` bytes.
template <class T> __device__ __forceinline__ T part(const u8 *records, i64 count, int before, int i, int row) {
    return ((const T *)(records + 32 * count * before))[32 * i + row];
}
__device__ __forceinline__ float byte_of(u32 word, int i) { return (float)(word >> 8 * i & 0xff); }

// d of SUPER blocks; the scale and the bias are multiples of it.
template <int SUPER_, int TIMES, int PLUS> struct Multiples {
    static constexpr int SUPER = SUPER_;
    static constexpr bool HALVES = false, BIAS = PLUS != 0;
    using Record = u16;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return part<u16>(at, count, 0, i, row);
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int) {
        const float d = half_to_float(r);
        return {{TIMES == 1 ? d : TIMES * d}, {PLUS == 0 ? 0.0f : PLUS * d}};
    }
};
using OneScale = Multiples<1, 1, 0>;
struct ScaleAndBias {
    static constexpr int SUPER = 1;
    static constexpr bool HALVES = false, BIAS = true;
    using Record = u32;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return part<u32>(at, count, 0, i, row);
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int) {
        return {{half_to_float((u16)r)}, {half_to_float((u16)(r >> 16))}};
    }
};
struct Exponent {  // 2^(e - 128), whose two smallest are subnormal: the book is doubled
    static constexpr int SUPER = 1;
    static constexpr bool HALVES = false, BIAS = false;
    using Record = u8;
    static __device__ __forceinline__ Record load(const u8 *at, i64, int i, int row) { return at[32 * i + row]; }
    static __device__ __forceinline__ Scales scales(const Record &e, int) {
        return {{__uint_as_float(e < 2 ? 0x00200000u << e : (u32)(e - 1) << 23)}, {}};
    }
};
struct SmallFloats {  // NVFP4: for each half 8 bits, 4 of exponent and 3 of fraction, and no number is 0: the book is doubled
    static constexpr int SUPER = 1;
    static constexpr bool HALVES = true, BIAS = false;
    using Record = u16;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return part<u16>(at, count, 0, i, row);
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int) { return {{of(r & 0xff), of(r >> 8)}, {}}; }
    static __device__ __forceinline__ float of(u32 bits) {
        return bits == 0x7f ? 0.0f : __uint_as_float((bits & 0x7f) << 20) * 0x1p119f;
    }
};
struct SixBitPairs {  // Q4_K and Q5_K: d, dmin, and 8 pairs of 6 bits in 12 bytes
    static constexpr int SUPER = 8;
    static constexpr bool HALVES = false, BIAS = true;
    using Record = uint4;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return part<uint4>(at, count, 0, i, row);
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int block) {
        const bool early = !(block & 4);  // the six bits are together, or four of them apart from the two above
        const u32 low = early ? 0x3f3f3f3fu : 0x0f0f0f0fu, high = early ? 0 : 0x30303030u;
        const u32 scale = ((early ? r.y : r.w) & low) | (r.y >> 2 & high);
        const u32 least = ((early ? r.z : r.w >> 4) & low) | (r.z >> 2 & high);
        const float d = half_to_float((u16)r.x), m = half_to_float((u16)(r.x >> 16));
        return {{d * byte_of(scale, block % 4)}, {-m * byte_of(least, block % 4)}};
    }
};
__device__ __forceinline__ u32 pair_of(const uint4 &bytes, int block) {
    return (block & 4 ? block & 2 ? bytes.w : bytes.z : block & 2 ? bytes.y : bytes.x) >> 16 * (block & 1);
}
struct FourBitPairs {  // Q2_K: 16 pairs of 4 bits, d, dmin
    struct Record {
        uint4 pairs;
        u32 d;
    };
    static constexpr int SUPER = 8;
    static constexpr bool HALVES = true, BIAS = true;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return {part<uint4>(at, count, 0, i, row), part<u32>(at, count, 16, i, row)};
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int block) { return of(pair_of(r.pairs, block), r.d); }
    static __device__ __forceinline__ Scales of(u32 word, u32 both) {
        const float d = half_to_float((u16)both), m = half_to_float((u16)(both >> 16));
        return {{d * (float)(word & 15), d * (float)(word >> 8 & 15)}, {-m * (float)(word >> 4 & 15), -m * (float)(word >> 12 & 15)}};
    }
};
struct SixBits {  // Q3_K: 16 scales of 6 bits in 12 bytes, d
    struct Record {
        uint2 low;
        u32 high;
        u16 d;
    };
    static constexpr int SUPER = 8;
    static constexpr bool HALVES = true, BIAS = false;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return {part<uint2>(at, count, 0, i, row), part<u32>(at, count, 8, i, row), part<u16>(at, count, 12, i, row)};
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int block) {
        const u32 low = (block & 2 ? r.low.y : r.low.x) >> (block & 4), high = r.high >> (block & 6);
        const u32 word = ((low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4) >> 16 * (block & 1);
        const float d = half_to_float(r.d);
        return {{d * (byte_of(word, 0) - 32.0f), d * (byte_of(word, 1) - 32.0f)}, {}};
    }
};
struct Bytes {  // Q6_K: 16 signed bytes, d
    struct Record {
        uint4 scales;
        u16 d;
    };
    static constexpr int SUPER = 8;
    static constexpr bool HALVES = true, BIAS = false;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return {part<uint4>(at, count, 0, i, row), part<u16>(at, count, 16, i, row)};
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int block) { return of(pair_of(r.scales, block), r.d); }
    static __device__ __forceinline__ Scales of(u32 word, u16 half) {
        const float d = half_to_float(half);
        return {{d * (float)(i8)word, d * (float)(i8)(word >> 8)}, {}};
    }
};
struct SixBitsApart {  // IQ4_XS: d, 8 times 2 bits, 8 times 4 bits
    static constexpr int SUPER = 8;
    static constexpr bool HALVES = false, BIAS = false;
    using Record = uint2;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return part<uint2>(at, count, 0, i, row);
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int block) {
        const u32 s = (r.y >> 4 * block & 15) | (r.x >> 16 >> 2 * block & 3) << 4;
        return {{half_to_float((u16)r.x) * ((float)s - 32.0f)}, {}};
    }
};

// What one block needs of its record, for whoever has blocks of many records under way.
template <class Scale> struct Alone {
    typename Scale::Record record;
    __device__ __forceinline__ void load(const u8 *at, i64 count, int block, int row) {
        record = Scale::load(at, count, (int)((u32)block / Scale::SUPER), row);
    }
    __device__ __forceinline__ Scales scales(int block) const { return Scale::scales(record, block); }
};
// Of 16 bytes two are needed: the registers of the others would be used again at once, which waits for the load.
template <class Scale, class D> struct PairAlone {
    u16 pair;
    D d;
    __device__ __forceinline__ void load(const u8 *at, i64 count, int block, int row) {
        const int i = block / 8;
        pair = ((const u16 *)at)[8 * (32 * i + row) + block % 8];
        d = part<D>(at, count, 16, i, row);
    }
    __device__ __forceinline__ Scales scales(int) const { return Scale::of(pair, d); }
};
template <> struct Alone<FourBitPairs> : PairAlone<FourBitPairs, u32> {};
template <> struct Alone<Bytes> : PairAlone<Bytes, u16> {};

template <class Code, class Scale> struct Format : Code, Scale {
    using OfBlock = Alone<Scale>;
    static __device__ __forceinline__ Scales scales(const typename Scale::Record &r, int block) {
        return lowered(Scale::scales(r, block));
    }
    static __device__ __forceinline__ Scales scales(const OfBlock &r, int block) { return lowered(r.scales(block)); }
    static __device__ __forceinline__ Scales lowered(Scales s) {  // for codes at the upper end of their bytes
        s.scale[0] *= 1.0f / (1 << Code::UP);
        s.scale[1] *= 1.0f / (1 << Code::UP);
        return s;
    }
    // With what codes have of a scale.
    static __device__ __forceinline__ Scales scaled(Scales s, const Codes &c) {
        if (Code::SCALED) s.scale[0] *= Code::factor(c);
        return s;
    }
};
using Q4_0 = Format<Linear<4, 0, true>, OneScale>;
using Q4_1 = Format<Linear<4, 0, false>, ScaleAndBias>;
using Q5_0 = Format<Linear<4, 1, true>, OneScale>;
using Q5_1 = Format<Linear<4, 1, false>, ScaleAndBias>;
using Q8_0 = Format<Linear<8, 0, true>, OneScale>;
using Q2_K = Format<Linear<2, 0, false>, FourBitPairs>;
using Q3_K = Format<Linear<2, 1, true>, SixBits>;
using Q4_K = Format<Linear<4, 0, false>, SixBitPairs>;
using Q5_K = Format<Linear<4, 1, false>, SixBitPairs>;
using Q6_K = Format<Linear<4, 2, true>, Bytes>;
using IQ4_NL = Format<Nonlinear, OneScale>;
using IQ4_XS = Format<Nonlinear, SixBitsApart>;
using MXFP4 = Format<TwiceE2M1, Exponent>;
using NVFP4 = Format<TwiceE2M1, SmallFloats>;
using TQ1_0 = Format<Ternary, Multiples<8, 1, -1>>;
using TQ2_0 = Format<Linear<2, 0, true>, Multiples<8, -1, 0>>;  // its codes are packed as 1 - code: from -2 to 1
using Q1_0 = Format<Linear<1, 0, false>, Multiples<4, 2, -1>>;
using Q2_0 = Format<Linear<2, 0, true>, Multiples<2, -1, 0>>;  // as TQ2_0

// ------------------------------------------------------------------------------------------------ where codes lie

template <class F> struct Unit {
    const u8 *low, *high, *records;
    i64 count;  // of records
    Unit() = default;
    __device__ __forceinline__ Unit(const u8 *w, i64 unit, i64 blocks, i64 row_bytes) {
        low = w + (u64)(u32)(32 * unit) * (u32)row_bytes;
        high = low + 128 * blocks * F::LOW;
        count = blocks / F::SUPER;
        records = high + 128 * blocks * F::HIGH + 32 * count * F::EXTRA;
    }
    // Extra bits of the block that is `i` behind another one of the same super-block.
    __device__ __forceinline__ u32 extra(u32 block, u32 i, int row) const {
        if (F::EXTRA == 0) return 0;
        const u8 *const first = records - 32 * count * F::EXTRA;
        return F::extra(first + F::EXTRA * (32 * (block / 8) + row), (int)(block % 8 + i));
    }
    __device__ __forceinline__ typename F::Record record(int block, int row) const {
        return F::load(records, count, (int)((u32)block / F::SUPER), row);
    }
    // What lane t of four needs of a row: two halves of 4 columns.
    __device__ __forceinline__ Codes codes(i64 block, int row, int t) const {
        Codes c;
        if (F::LOW == 8) {
            const u32 *word = (const u32 *)(low + 1024 * block + 16 * row) + t;
            c.low[0] = word[0];
            c.low[1] = word[128];
        } else {
            c.low[0] = window<F::LOW>(low, block, row, t);
        }
        if (F::HIGH) c.high = window<F::HIGH == 0 ? 1 : F::HIGH>(high, block, row, t);
        c.extra = extra((u32)block, 0, row);
        c.t = t;
        return c;
    }
    template <int W> static __device__ __forceinline__ u32 window(const u8 *plane, i64 block, int row, int t) {
        return F::template window<W>(((const u32 *)(plane + 128 * W * block + 4 * W * row))[t * W / 4], t);
    }
};

template <int WORDS> __device__ __forceinline__ void load_words(u32 *to, const u8 *from) {
    if (WORDS == 1) to[0] = load_stream((const u32 *)from);
    if (WORDS == 2) {
        const uint2 v = load_stream((const uint2 *)from);
        to[0] = v.x, to[1 % WORDS] = v.y;
    }
    if (WORDS == 4) {
        const uint4 v = load_stream((const uint4 *)from);
        to[0] = v.x, to[1 % WORDS] = v.y, to[2 % WORDS] = v.z, to[3 % WORDS] = v.w;
    }
}
template <class F> struct RowCodes {  // of a row and block, all in one thread
    static constexpr int HIGH = F::HIGH ? F::HIGH : 1;
    u32 low[F::LOW], high[HIGH], extra;
    // Of the block that is `i` behind another one: `i` is known when this is compiled, and one address does for all of them.
    __device__ __forceinline__ void load(const Unit<F> &u, u32 block, u32 i, int row) {
        constexpr u32 WORDS = F::LOW < 4 ? F::LOW : 4;
        const u8 *const first = u.low + (128 * F::LOW * block + 4 * WORDS * row) + 128 * F::LOW * i;
#pragma unroll
        for (u32 w = 0; w < F::LOW; w += WORDS) load_words<WORDS>(low + w, first + 128 * w);
        if (F::HIGH) load_words<HIGH>(high, u.high + (128 * HIGH * block + 4 * HIGH * row) + 128 * HIGH * i);
        if (F::EXTRA) extra = u.extra(block, i, row);
    }
    __device__ __forceinline__ Codes at(int t) const {
        if (F::LOW == 8) return {{low[t], low[(4 + t) % F::LOW]}, 0};
        const u32 first = F::template window<F::LOW>(low[t * F::LOW / 4 % F::LOW], t);
        return {{first}, F::template window<HIGH>(high[t * HIGH / 4], t), extra, t};
    }
};
