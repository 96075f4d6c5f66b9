// Items by which entries are put in an order: the key of an entry above its number.  No two are equal, and equal entries
// come in their order.

constexpr u64 LAST = ~0ull;  // comes after every item

// Keys are ordered as entries are: -0 is 0, and NaN comes last both ways.
__device__ __forceinline__ u64 item_of(float x, i64 number, bool descending) {
    const u32 bits = __float_as_uint(descending ? -x : x);
    u32 key = bits >> 31 ? ~bits : bits | 0x80000000u;
    if (x == 0.0f) key = 0x80000000u;
    if (x != x) key = 0xffffffffu;
    return (u64)key << 32 | (u32)number;
}
