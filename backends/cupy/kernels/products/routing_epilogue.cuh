// Experts are chosen by the results of a product: the last of its blocks reads them all, a warp those of a token.
template <int EACH> struct RoutingEpilogue {
    struct Words {
        Routing routing;
        i64 tokens;
        u32 *number;  // 0 before the launch and behind it
    };
    static constexpr bool READS = true;
    // `room` is shared and has room for 32 EACH scores of each token; all threads of a block come here.
    static __device__ __forceinline__ void finish(const Words &a, float *room) {
        SHARED(number, u32);
        if (!comes_last(a.number, gridDim.x, number)) return;
        const int token = threadIdx.x / 32;
        if (token < (int)a.tokens) route_token<EACH>(a.routing, token, room + token * 32 * EACH);
    }
};
