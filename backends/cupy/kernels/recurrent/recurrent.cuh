// What recurrences share: operands, states, and arithmetic on four floats.

struct Rows {  // a tensor [sequence, token, head, element]; strides in elements
    float *at;
    i64 sequence, token, head, element;
    __device__ float *row(i64 n, i64 t, i64 h) const { return at + n * sequence + t * token + h * head; }
};

struct States {  // states [heads, value size, key size]; the one numbered i is row slots[i] of `count`, or row i
    float *at;
    const int *slots;
    i64 count;
    __device__ i64 row(i64 i) const { return slots ? slots[i] : i; }
};

// Where sequence n begins: with old state n * step; with row n of `aside` instead where moved[n] is 1.  See `shelter`.
struct Beginning {
    States old;
    i64 step;
    const float *aside;
    const int *moved;
    __device__ const float *at(i64 n, i64 state_size) const {
        return moved && moved[n] ? aside + n * state_size : old.at + old.row(n * step) * state_size;
    }
};

// Whether all states that a sequence uses exist.  The same for all threads of a block.
__device__ __forceinline__ bool has_states(const Beginning &from, const States &kept, i64 n, i64 first, i64 count,
                                           const Fault &fault) {
    i64 slot = from.old.row(n * from.step), limit = from.old.count;
    bool legal = slot >= 0 && slot < limit;
    for (i64 i = first; legal && i < first + count; i++) {
        slot = kept.row(i);
        legal = slot >= 0 && slot < kept.count;
    }
    if (!legal && threadIdx.x == 0) note_fault(fault, slot);
    return legal;
}

__device__ __forceinline__ void operator*=(float4 &x, float y) { x.x *= y, x.y *= y, x.z *= y, x.w *= y; }
__device__ __forceinline__ void operator*=(float4 &x, float4 y) { x.x *= y.x, x.y *= y.y, x.z *= y.z, x.w *= y.w; }
__device__ __forceinline__ float dot(float4 x, float4 y, float sum) {
    return fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
}
__device__ __forceinline__ float4 fma4(float x, float4 y, float4 z) {
    return make_float4(fmaf(x, y.x, z.x), fmaf(x, y.y, z.y), fmaf(x, y.z, z.z), fmaf(x, y.w, z.w));
}
