// Eight elements of a lane, in the order in which `bring` has them: from column 0 on, and from column 16 on.
__device__ __forceinline__ void load_lane(float (&v)[8], const float *from) {
    const float4 low = *(const float4 *)from, high = *(const float4 *)(from + 16);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}
__device__ __forceinline__ void store_lane(float *to, const float (&v)[8]) {
    *(float4 *)to = make_float4(v[0], v[1], v[2], v[3]), *(float4 *)(to + 16) = make_float4(v[4], v[5], v[6], v[7]);
}
