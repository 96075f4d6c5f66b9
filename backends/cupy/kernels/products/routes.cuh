// Products take their rows in entries: rows of x in order, or slots of tokens of which each goes to an expert.

// The row of x of an entry: a token has `used` entries, of which number i takes row i % `shared` of the token's.
__device__ __forceinline__ i64 row_of(i64 entry, i64 used, i64 shared) {
    return entry / used * shared + entry % used % shared;
}
// Which matrix an entry takes, of `matrices` from `first` on that are here, of `total`; -1 if it is elsewhere.
struct Choice {
    const i32 *ids;  // or null: of one matrix, which all take
    i64 first, matrices, total;
    Fault fault;
    __device__ __forceinline__ i64 matrix_of(i64 entry) const {
        const i64 id = ids[entry], mine = id - first;
        return id >= 0 && id < total && mine >= 0 && mine < matrices ? mine : -1;
    }
    // By one thread for each entry.
    __device__ __forceinline__ void check(i64 entry) const {
        const i64 id = ids[entry];
        if (id < 0 || id >= total) note_fault(fault, id);
    }
};
// How the results of a token's experts become one: each times its share, and that of one more expert, which all tokens
// have, if there is one.
struct Summed {
    const float *shares;  // dense [token, used]; null where nothing is summed
    i64 used;
    const float *x, *gate;  // rows of the other expert, and what gives its share by a sigmoid; or null
    i64 x_step, gate_step;
    __device__ __forceinline__ int entries() const { return (int)used + (x ? 1 : 0); }
    __device__ __forceinline__ float share(i64 token, int entry) const {
        if (entry < used) return shares[token * used + entry];
        return gate ? logistic(gate[token * gate_step]) : 1.0f;
    }
};
// Several products of the same rows, in one launch: they share its blocks, or two of them those of a gated unit.
constexpr int MOST_PRODUCTS = 4;
enum { ALONE, SWIGLU, GEGLU };
__device__ __forceinline__ float gated(i64 unit, float gate, float up) { return (unit == SWIGLU ? silu(gate) : gelu(gate)) * up; }
