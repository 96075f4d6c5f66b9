// Cells of states: float32, or numbers of 16 bits, which are rounded to the nearest where they are written.

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
