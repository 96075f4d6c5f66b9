// Results of products are left as they are.  Another header has the same struct where experts are chosen by them.
struct Epilogue {
    struct Words {
        i64 unused;
    };
    static constexpr bool READS = false;
    static __device__ __forceinline__ void finish(const Words &, float *) {}
};
