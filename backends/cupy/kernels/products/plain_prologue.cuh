// Rows of x are read as they are.  Generated text has the same struct where they are computed of other rows.
struct Prologue {
    struct Words {
        i64 unused;
    };
    static constexpr bool COMPUTES = false;
    static constexpr int NUMBERS = 0;
    static __device__ __forceinline__ void reduce(const Words &, i64, int, float *, float *) {}
    static __device__ __forceinline__ void bring(const Words &, const float *, float4 (&)[2], i64, int, int, int, bool) {}
};
