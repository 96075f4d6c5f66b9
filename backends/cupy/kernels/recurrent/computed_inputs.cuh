// The delta rule computes its queries, keys, values and gates: each block those of its rows and its head.  Blocks of the
// same key head compute the same queries and keys; the last of them keeps the rows of their channels.
struct Inputs {
    struct Words {
        DeltaSources from;
        u32 *numbers;  // for each sequence and key head 0, before the launch and behind it
    };
    static constexpr bool COMPUTES = true;
    // The first of four channels of a thread: of its queries, keys, or values from `row0` on.
    template <int D> static __device__ __forceinline__ i64 channel_of(const Words &a, i64 h, i64 key_head, int row0) {
        const int part = threadIdx.x / (D / 4), within = threadIdx.x % (D / 4) * 4;
        if (part < 2) return (part * a.from.key_heads + key_head) * D + within;
        return (2 * a.from.key_heads + h) * D + row0 + 4 * threadIdx.x - 2 * D;
    }
    // Whether a thread has values, of which a block has ROWS.
    template <int D, int ROWS> static __device__ __forceinline__ bool has_values(int row0) {
        return 4 * (int)threadIdx.x >= 2 * D && 4 * (int)threadIdx.x < 2 * D + min(ROWS, D - row0);
    }
    template <int D> static __device__ __forceinline__ void ask(const Words &a, i64 n, i64 h, i64 key_head, int row0) {
        a.from.ask_for_gates(h);
        if (4 * (int)threadIdx.x < 2 * D) a.from.ask_for_channels(n, channel_of<D>(a, h, key_head, row0));
    }
    // Puts all tokens into stages of SIZE floats; thread t gets the gates of token t.
    template <int D, int ROWS>
    static __device__ __forceinline__ void compute(const Words &a, float *stage, int size, i64 n, i64 h, i64 key_head, int row0, int tokens,
                                                   float &g, float &beta) {
        const bool is_shared = 4 * (int)threadIdx.x < 2 * D, is_value = has_values<D, ROWS>(row0), is_there = is_shared || is_value;
        // Other lanes go along, since sums need all lanes, with what this block may read.
        const i64 channel = is_there ? channel_of<D>(a, h, key_head, row0) : key_head * D;
        a.from.template convolve<D>(n, 0, tokens, channel, is_shared, is_value, [&](int t, float4 y) {
            if (is_there) *(float4 *)(stage + t * size + 4 * threadIdx.x) = y;
        });
        SHARED(room, float[32]);
        for (int t = 0; t < tokens; t++) {
            const float2 logits = a.from.products.columns ? a.from.computed_logits(n, t, h, room) : a.from.stored_logits(n, t, h);
            const float2 gates = a.from.gates(n, t, h, logits);
            if ((int)threadIdx.x == t) g = gates.x, beta = gates.y;
        }
    }
    // Behind a barrier after `compute`, when no thread of the block reads old rows any more.
    template <int D> static __device__ __forceinline__ void keep(const Words &a, i64 n, i64 key_head) {
        SHARED(number, u32);
        u32 *taken = a.numbers + n * a.from.key_heads + key_head;
        if (threadIdx.x == 0) number = take_number(taken);
        __syncthreads();
        if (number + 1 < gridDim.x * (u32)(a.from.value_heads / a.from.key_heads)) return;
        if (threadIdx.x == 0) *taken = 0;
        if (4 * (int)threadIdx.x < 2 * D) a.from.keep_rows(n, channel_of<D>(a, 0, key_head, 0));
    }
};
