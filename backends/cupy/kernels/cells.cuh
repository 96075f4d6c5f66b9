// Cells of states: float32, numbers of 16 bits, which are rounded to the nearest where they are written, or blocks.

__device__ __forceinline__ void put_cell(float *to, float x) { *to = x; }
__device__ __forceinline__ void put_cell(half_bits *to, float x) { to->bits = float_to_half(x); }
__device__ __forceinline__ void put_cell(bf16_bits *to, float x) { to->bits = float_to_bf16(x); }

// Four or eight cells beside each other as float32; their address is a multiple of 16 bytes, or of all that they have.
__device__ __forceinline__ float4 four_cells(const float *from) { return *(const float4 *)from; }
template <class Cell> __device__ __forceinline__ float4 four_cells(const Cell *from) {
    const uint2 two = *(const uint2 *)from;
    return make_float4(to_float(Cell{(u16)two.x}), to_float(Cell{(u16)(two.x >> 16)}), to_float(Cell{(u16)two.y}), to_float(Cell{(u16)(two.y >> 16)}));
}
__device__ __forceinline__ void eight_cells(float *to, const float *from) {
    const float4 one = *(const float4 *)from, two = *(const float4 *)(from + 4);
    to[0] = one.x, to[1] = one.y, to[2] = one.z, to[3] = one.w;
    to[4] = two.x, to[5] = two.y, to[6] = two.z, to[7] = two.w;
}
template <class Cell> __device__ __forceinline__ void eight_cells(float *to, const Cell *from) {
    const uint4 all = *(const uint4 *)from;
    const u32 pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = to_float(Cell{(u16)(pairs[i / 2] >> 16 * (i % 2))});
}

// Blocks of 32 numbers as files have them: scale, lowest number, fifth bits of codes, other bits.  The block of a number
// begins at an even address.  MIDDLE is the code of 0, or codes are looked up.
constexpr int CODE_BOOK = -1;
template <int BITS_, int MIDDLE, bool HAS_LOWEST_> struct BlockOf32 {
    static constexpr bool HAS_LOWEST = HAS_LOWEST_;
    static constexpr int BITS = BITS_, SIZE = 32, FIFTHS = HAS_LOWEST ? 4 : 2, CODES = FIFTHS + (BITS == 5 ? 4 : 0), BYTES = CODES + (BITS == 8 ? 32 : 16);

    static __device__ __forceinline__ float number(int level, float scale, float lowest) {
        return HAS_LOWEST ? fmaf((float)level, scale, lowest) : (float)level * scale;
    }
    // The multiples of the scale that four codes stand for, a byte each.
    static __device__ __forceinline__ u32 looked_up(u32 codes) {
        const u32 s = codes | codes >> 4, pairs = (s & 0xff) | (s >> 8 & 0xff00);
        const u32 first = __byte_perm(0xbfad9881u, 0xf6eaddcfu, pairs & 0x7777), second = __byte_perm(0x26190d01u, 0x71594535u, pairs & 0x7777);
        return __byte_perm(first, second, 0x3210 | (pairs >> 1 & 0x4444));
    }
    static __device__ __forceinline__ int level(u32 codes, int i) {
        return BITS == 8 || MIDDLE == CODE_BOOK ? (int)(i8)(codes >> 8 * i) : (int)(codes >> 8 * i & 255) - MIDDLE;
    }
    // Numbers i to i + 3; i is a multiple of 4.
    static __device__ __forceinline__ float4 four(const u8 *block, int i) {
        const u16 *at = (const u16 *)(block + CODES + (BITS == 8 ? i : i % 16));
        u32 codes = at[0] | (u32)at[1] << 16;
        if (BITS < 8) codes = codes >> i / 16 * 4 & 0x0f0f0f0fu;
        if (BITS == 5) codes |= (((const u16 *)(block + FIFTHS))[i / 16] >> i % 16 & 15) * 0x00204081u << 4 & 0x10101010u;
        if (MIDDLE == CODE_BOOK) codes = looked_up(codes);
        const float scale = half_to_float(*(const u16 *)block), lowest = HAS_LOWEST ? half_to_float(*(const u16 *)(block + 2)) : 0.0f;
        return make_float4(number(level(codes, 0), scale, lowest), number(level(codes, 1), scale, lowest), number(level(codes, 2), scale, lowest), number(level(codes, 3), scale, lowest));
    }
};
using Q8_0Block = BlockOf32<8, 0, false>;
using Q4_0Block = BlockOf32<4, 8, false>;
using Q4_1Block = BlockOf32<4, 0, true>;
using Q5_0Block = BlockOf32<5, 16, false>;
using Q5_1Block = BlockOf32<5, 0, true>;
using IQ4_NLBlock = BlockOf32<4, CODE_BOOK, false>;

// Numbers of blocks that lie beside each other, from `first` on.
template <class Block> struct InBlocks {
    const u8 *blocks;
    i64 first;

    __device__ __forceinline__ InBlocks(const void *blocks = nullptr, i64 first = 0) : blocks((const u8 *)blocks), first(first) {}
    __device__ __forceinline__ explicit operator bool() const { return blocks != nullptr; }
    __device__ __forceinline__ InBlocks operator+(i64 n) const { return InBlocks(blocks, first + n); }
    __device__ __forceinline__ const u8 *block() const { return blocks + (first >> 5) * Block::BYTES; }
    __device__ __forceinline__ float operator[](i64 i) const {
        const InBlocks at = *this + i;
        const float4 x = Block::four(at.block(), (int)at.first & 28);
        const int n = (int)at.first & 3;
        return n < 2 ? (n == 0 ? x.x : x.y) : n == 2 ? x.z : x.w;
    }
};
template <class Block> __device__ __forceinline__ float4 four_cells(const InBlocks<Block> &from) {
    return Block::four(from.block(), (int)from.first & 28);
}
template <class Block> __device__ __forceinline__ void eight_cells(float *to, const InBlocks<Block> &from) {
    const float4 one = four_cells(from), two = four_cells(from + 4);
    to[0] = one.x, to[1] = one.y, to[2] = one.z, to[3] = one.w;
    to[4] = two.x, to[5] = two.y, to[6] = two.z, to[7] = two.w;
}

// Where cells of a type are read: a pointer, or numbers in blocks.
template <class Cell> struct ReadFrom {
    using Reader = const Cell *;
};
template <int BITS, int MIDDLE, bool HAS_LOWEST> struct ReadFrom<BlockOf32<BITS, MIDDLE, HAS_LOWEST>> {
    using Reader = InBlocks<BlockOf32<BITS, MIDDLE, HAS_LOWEST>>;
};
template <class Cell> using CellReader = typename ReadFrom<Cell>::Reader;
