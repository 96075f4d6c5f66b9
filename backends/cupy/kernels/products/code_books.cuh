// Types with code books: IQ1, IQ2 and IQ3.  An index of 8 to 11 bits stands for 4 or 8 columns.
//
// The book of a kernel is in shared memory, [entries] of 4 bytes.  Lanes look up entries of their own: shared memory serves
// 32 of them in about 3.5 cycles, the most that random ones have of a bank.  Constant memory would take a cycle for each, and
// the first cache one for each line, of which a book has 8 to 64.  Entries of 8 columns are levels of 4 bits, which
// __byte_perm takes as selectors, so that 8 columns are one access as well.
//
// The signs are a plane of HIGH bits.  Where a file has 7 signs for 8 columns, an even number is negative, and the bit of
// the eighth column is a bit of something else: of the scale, or of the index.

__device__ __forceinline__ float odd(u32 number) { return (float)(2 * number + 1); }

// book_levels.cuh has the levels of an entry, 2 or 4 bits each, which become a word of a book.
template <u32 A, u32 B> struct Magnitudes {  // four columns: their magnitudes
    static __device__ __forceinline__ u32 word(u32 levels) { return __byte_perm(A, B, levels); }
};
struct Selectors {  // eight columns: their levels
    static __device__ __forceinline__ u32 word(u32 levels) {
        levels = (levels | levels << 8) & 0x00ff00ffu;
        levels = (levels | levels << 4) & 0x0f0f0f0fu;
        return (levels | levels << 2) & 0x33333333u;
    }
};
template <class Levels, class Entry> struct InShared {
    static constexpr int BOOK = Levels::ENTRIES;
    static __device__ __forceinline__ u32 *book() {
        SHARED(words, u32[BOOK]);
        return words;
    }
    // Other threads see it behind the next barrier.
    static __device__ __forceinline__ void load_book() {
        u32 *to = book();
        for (int i = threadIdx.x; i < BOOK; i += blockDim.x) to[i] = Entry::word(Levels::of(i));
    }
};

// ---------------------------------------------------------------------------------------------------------- signs

// What the highest bytes of a plane of signs have at the eighth column of a group, which is of columns 16 h + 8 k ...: bit
// 4 k + h.
__device__ __forceinline__ u32 eighths(u32 plane) { return plane >> 26; }
// The eighth sign of each group is the sum of the others.
__device__ __forceinline__ u32 even_signs(u32 plane) {
    const u32 seven = plane & 0x33ffffffu, pairs = seven ^ seven >> 16, all = pairs ^ pairs >> 8;
    return seven | ((all ^ all << 2) & 0xcc) << 24;
}
// Numbers from 1 to 127 are negative where their byte of `signs` has bit `at`.
__device__ __forceinline__ u32 with_signs(u32 numbers, u32 signs, int at) {
    const u32 negative = signs >> at & 0x01010101u;
    return (numbers ^ negative * 0xff) + negative;
}

struct Whole : Plain {  // lanes see words of planes as they are
    template <int W> static __device__ __forceinline__ u32 window(u32 word, int) { return word; }
};
struct ByteOfBlock : Whole {
    static constexpr int EXTRA = 8;
    static __device__ __forceinline__ u32 extra(const u8 *at, int block) { return at[block]; }
};
// Four bits of each block stand at its eighth signs.
struct FactorInSigns : Whole {
    static constexpr bool SCALED = true;
    static __device__ __forceinline__ float factor(const Codes &c) {
        const u32 bits = eighths(c.high);
        return odd((bits & 3) | (bits >> 2 & 12));
    }
};

// -------------------------------------------------------------------------------------------------- IQ3: four columns

// The indices of columns 16 h + 4 t ... of lanes t and t + 1 have a word: of h = 0 and 1 of the first, then of the second.
template <class More, class Book_, bool EVEN> struct Quads : More, Book_ {
    using Book_::BOOK;
    using Book_::load_book;
    static constexpr int LOW = 2, HIGH = 1, UP = 0;
    static __device__ __forceinline__ u32 codes(const Codes &c, int half) {
        u32 index = c.low[0] >> (16 * (c.t % 2) + 8 * half) & 0xff;
        if (BOOK > 256) index |= (c.extra >> (4 * half + c.t) & 1) << 8;
        return with_signs(Book_::book()[index], EVEN ? even_signs(c.high) : c.high, 2 * c.t + half);
    }
};

// ------------------------------------------------------------------------------------------------- IQ2: eight columns

enum class TopBits { NONE, EXTRA, SIGNS };  // where the ninth bits of an index are, and more
template <class More, class Book_, TopBits TOP, bool EVEN> struct Octets : More, Book_ {
    using Book_::BOOK;
    using Book_::load_book;
    static constexpr int LOW = 1, HIGH = 1, UP = 0;
    static __device__ __forceinline__ u32 codes(const Codes &c, int half) {
        const int group = 2 * half + c.t / 2;
        u32 index = c.low[0] >> 8 * group & 0xff;
        if (TOP == TopBits::EXTRA) index |= (c.extra >> 2 * group & 3) << 8;
        if (TOP == TopBits::SIGNS) index |= (eighths(c.high) >> (4 * (c.t / 2) + half) & 1) << 8;
        const u32 numbers = __byte_perm(0x002b1908u, 0, Book_::book()[index] >> 16 * (c.t % 2) & 0xffff);
        return with_signs(numbers, EVEN ? even_signs(c.high) : c.high, 2 * c.t + half);
    }
};

// ------------------------------------------------------------------------------------------------- IQ1: eight columns

// -1, 0 or 1, and an eighth more or less: in eighths.  Two extra bytes have four bits for each index: three above its
// eight, and the direction of its eighth.  Or, where a block has one direction, that is the last of these bits, and the
// others are its scale.
template <class Book_, bool OF_BLOCK> struct Eighths : Whole, Book_ {
    using Book_::BOOK;
    using Book_::load_book;
    static constexpr int LOW = 1, HIGH = 0, UP = 0, EXTRA = 16;
    static constexpr bool SCALED = OF_BLOCK;
    static __device__ __forceinline__ u32 extra(const u8 *at, int block) { return ((const u16 *)at)[block]; }
    static __device__ __forceinline__ float factor(const Codes &c) {
        return odd((c.extra >> 3 & 1) | (c.extra >> 6 & 2) | (c.extra >> 9 & 4));
    }
    static __device__ __forceinline__ u32 codes(const Codes &c, int half) {
        const int group = 2 * half + c.t / 2;
        const u32 index = (c.low[0] >> 8 * group & 0xff) | (c.extra >> 4 * group & 7) << 8;
        const u32 numbers = c.extra >> (OF_BLOCK ? 15 : 4 * group + 3) & 1 ? 0x0007fff7u : 0x000901f9u;
        return __byte_perm(numbers, 0, Book_::book()[index] >> 16 * (c.t % 2) & 0xffff);
    }
};

// -------------------------------------------------------------------------------------------------------- records

// d, of which a unit is 1 / PARTS, for types that have the factors of blocks elsewhere.
template <int PARTS> struct OneUnit : Multiples<8, 1, 0> {
    static __device__ __forceinline__ Scales scales(const u16 &d, int) { return {{half_to_float(d) * (1.0f / PARTS)}, {}}; }
};
struct FourBits {  // IQ3_S: 4 bits for each block, d
    struct Record {
        u32 factors;
        u16 d;
    };
    static constexpr int SUPER = 8;
    static constexpr bool HALVES = false, BIAS = false;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return {part<u32>(at, count, 0, i, row), part<u16>(at, count, 4, i, row)};
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int block) {
        return {{half_to_float(r.d) * odd(r.factors >> 4 * block & 15)}, {}};
    }
};
struct FourBitsOfHalves {  // IQ2_XS and IQ2_S: 4 bits for each half, d; eighths
    struct Record {
        uint2 factors;
        u16 d;
    };
    static constexpr int SUPER = 8;
    static constexpr bool HALVES = true, BIAS = false;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return {part<uint2>(at, count, 0, i, row), part<u16>(at, count, 8, i, row)};
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int block) {
        const u32 word = (block & 4 ? r.factors.y : r.factors.x) >> 8 * (block % 4);
        const float d = half_to_float(r.d) * 0.125f;
        return {{d * odd(word & 15), d * odd(word >> 4 & 15)}, {}};
    }
};
struct ThreeBitsOfHalves {  // IQ1_M: four times 12 bits, 3 for each half, and 4 of d; eighths
    static constexpr int SUPER = 8;
    static constexpr bool HALVES = true, BIAS = false;
    using Record = uint2;
    static __device__ __forceinline__ Record load(const u8 *at, i64 count, int i, int row) {
        return part<uint2>(at, count, 0, i, row);
    }
    static __device__ __forceinline__ Scales scales(const Record &r, int block) {
        const u32 bits = (r.x >> 12 & 0xf) | (r.x >> 24 & 0xf0) | (r.y >> 4 & 0xf00) | (r.y >> 16 & 0xf000);
        const float d = half_to_float((u16)bits) * 0.125f;
        const u32 word = (block & 4 ? r.y : r.x) >> (16 * (block / 2 % 2) + 6 * (block % 2));
        return {{d * odd(word & 7), d * odd(word >> 3 & 7)}, {}};
    }
};

using BookOfIQ1 = InShared<LevelsOfIQ1_S, Selectors>;
using IQ3_S = Format<Quads<ByteOfBlock, InShared<LevelsOfIQ3_S, Magnitudes<0x07050301u, 0x0f0d0b09u>>, false>, FourBits>;
using IQ3_XXS = Format<Quads<FactorInSigns, InShared<LevelsOfIQ3_XXS, Magnitudes<0x1c140c04u, 0x3e342c24u>>, true>, OneUnit<4>>;
using IQ2_S = Format<Octets<ByteOfBlock, InShared<LevelsOfIQ2_S, Selectors>, TopBits::EXTRA, false>, FourBitsOfHalves>;
using IQ2_XS = Format<Octets<Whole, InShared<LevelsOfIQ2_XS, Selectors>, TopBits::SIGNS, true>, FourBitsOfHalves>;
using IQ2_XXS = Format<Octets<FactorInSigns, InShared<LevelsOfIQ2_XXS, Selectors>, TopBits::NONE, true>, OneUnit<8>>;
using IQ1_S = Format<Eighths<BookOfIQ1, true>, OneUnit<8>>;
using IQ1_M = Format<Eighths<BookOfIQ1, false>, ThreeBitsOfHalves>;
