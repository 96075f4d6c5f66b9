// The gated delta rule by chunks, second part: from chunk to chunk with the state in registers.

struct Scan {
    const char *keys, *heads;
    Rows v, out;
    Beginning from;
    States kept;
    i64 kept_step;  // sequence n ends with kept state n * kept_step
    Fault fault;
    i64 tokens, key_records, value_heads, run, value_size;
};

// What a block has in shared memory: stages of a chunk's records and values, and halves of sums.
template <int D, int C, int BV, bool CHANNELS, bool EXACT>
struct Room {
    using R = Record<D, C, CHANNELS, EXACT>;
    static constexpr int V_STEP = BV + 4, STAGE = R::KEYS + R::HEADS + 4 * C * V_STEP, SUMS = 12 * C * BV;
};

// `to` and `from` are where the first bytes of this thread lie.
template <int THREADS_HERE, int BYTES>
__device__ __forceinline__ void copy_async(char *to, const char *from) {
#pragma unroll
    for (int i = 0; i < BYTES; i += THREADS_HERE * 16)
        if (i + THREADS_HERE * 16 <= BYTES || (int)threadIdx.x < (BYTES - i) / 16) cp_async_16(to + i, from + i);
}

// All threads of a block bring it the records, 16 bytes each at a time.
template <int D, int C, int BV, bool CHANNELS, bool EXACT>
struct ByThreads {
    using R = Record<D, C, CHANNELS, EXACT>;
    static constexpr int STAGES = 2, AHEAD = 1;  // so that all devices have room, and an A100 for two fast blocks
    const char *keys, *heads;
    __device__ ByThreads(const char *keys, const char *heads, char *)
        : keys(keys + threadIdx.x * 16), heads(heads + threadIdx.x * 16) {}
    __device__ void bring(const Scan &a, int, char *stage) {
        stage += threadIdx.x * 16;
        copy_async<4 * BV, R::KEYS>(stage, keys);
        copy_async<4 * BV, R::HEADS>(stage + R::KEYS, heads);
        keys += a.key_records * R::KEYS, heads += a.value_heads * R::HEADS;
    }
    __device__ void wait(int) const {}
    __device__ void release(int) const {}
};

__device__ __forceinline__ float4 quad(const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }
__device__ __forceinline__ void add(float (&x)[4], float4 y) { x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w; }

// A block carries BV rows of a head's state through all chunks; two warps share 16 of them, and have half of the keys
// each.  All products are transposed (value rows x tokens), so that what one product gives is the left operand of the
// next, in the same registers.  Of the products with the state each warp has half a sum.  Once a chunk the two exchange
// K S, with all of which both go on, and Q S of the half of the tokens whose outputs the other one finishes.  `By` brings records:
// AHEAD chunks before they are read, to one of STAGES.
template <class By, int D, int C, int BV, bool CHANNELS, bool EXACT>
__device__ __forceinline__ void scan(const Scan &a) {
    using R = Record<D, C, CHANNELS, EXACT>;
    using M = Room<D, C, BV, CHANNELS, EXACT>;
    constexpr int THREADS_HERE = 4 * BV, HALF = D / 2, SIDE = C / 16, ROWS = 16 * D * 2;
    constexpr int V_STEP = M::V_STEP, STAGE = M::STAGE, STAGES = By::STAGES, AHEAD = By::AHEAD;
    constexpr int OWN = SIDE / 2;  // blocks of 16 tokens that a warp finishes
    static_assert(SIDE % 2 == 0, "two warps finish as many");
    DYNAMIC_SHARED(shared, char);
    float4 *sums = (float4 *)(shared + STAGES * STAGE), *of_queries = sums + C / 8 * THREADS_HERE;
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2, first = half * HALF;
    const int local = threadIdx.x / 64 * 16 + lane / 4, column = lane % 4 * 2, row = blockIdx.x * BV + local;
    const int tokens = (int)a.tokens, chunks = (tokens + C - 1) / C;
    const i64 h = blockIdx.y, n = blockIdx.z, key_record = a.run ? h / a.run : h % a.key_records;
    const i64 state_size = a.value_heads * a.value_size * D, inside = (h * a.value_size + row) * D + first + column;

    if (!has_states(a.from, a.kept, n, n * a.kept_step, 1, a.fault)) return;

    By records(a.keys + (n * chunks * a.key_records + key_record) * R::KEYS,
               a.heads + (n * chunks * a.value_heads + h) * R::HEADS, shared + STAGES * STAGE + M::SUMS);
    const int copied = threadIdx.x / (BV / 4), beside = threadIdx.x % (BV / 4) * 4;
    const float *next_values = a.v.row(n, copied, h) + blockIdx.x * BV + beside;
    char *to = shared;
    auto fetch = [&](int chunk) {
        records.bring(a, chunk, to);
        float *V = (float *)(to + R::KEYS + R::HEADS) + copied * V_STEP + beside;
        const int left = tokens - chunk * C - copied;
#pragma unroll
        for (int r = 0; r < C; r += 16, next_values += 16 * a.v.token)
            if (r < left)
                cp_async_16(V + r * V_STEP, next_values);
            else
                *(float4 *)(V + r * V_STEP) = make_float4(0, 0, 0, 0);
        to += chunk % STAGES == STAGES - 1 ? (1 - STAGES) * STAGE : STAGE;
    };
#pragma unroll
    for (int chunk = 0; chunk < AHEAD; chunk++) {
        if (chunk < chunks) fetch(chunk);
        cp_async_commit();
    }

    const float *old = a.from.at(n, state_size) + inside;
    float S[HALF / 8][4];
#pragma unroll
    for (int j = 0; j < HALF / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const float2 x = *(const float2 *)(old + 4 * e * D + 8 * j);
            S[j][e] = x.x, S[j][e + 1] = x.y;
        }

    // In tiles of keys, of which 16 further begin two units further, and those are shuffled: at place ^ 32.
    const int in_rows = by_rows<D / 8>(0, first), in_columns = by_columns<D / 8>(0, first), in_square = by_rows<2>(0, 0);
    const int other = threadIdx.x ^ 32;
    float *out = a.out.row(n, 16 * OWN * half + column, h) + row * a.out.element;

    for (int chunk = 0; chunk < chunks; chunk++) {
        cp_async_wait<AHEAD - 1>();
        records.wait(chunk);
        __syncthreads();  // the stage is complete, and nobody reads the one before any more
        if (chunk > 0 && chunk - 1 + STAGES < chunks) records.release(chunk - 1);
        if (chunk + AHEAD < chunks) fetch(chunk + AHEAD);
        cp_async_commit();
        const char *keys = shared + chunk % STAGES * STAGE, *heads = keys + R::KEYS, *squares = heads + in_square;
        const float *factors = (const float *)(heads + R::FACTORS) + column;
        const float *V = (const float *)(heads + R::HEADS) + column * V_STEP + local;

        float KS[C / 8][4], O[C / 8][4];  // of O, first the tokens that this warp finishes
        clear(KS), clear(O);
#pragma unroll
        for (int k = 0; k < HALF / 16; k++) {
            const Left f = left_of<EXACT>(S[2 * k], S[2 * k + 1]);
            const char *from = keys + (in_rows ^ 32 * k);
#pragma unroll
            for (int i = 0; i < SIDE; i++) {
                multiply_rows<EXACT>(KS[2 * i], KS[2 * i + 1], f, from + i * ROWS, R::TILE);
                multiply_rows<EXACT>(O[2 * i], O[2 * i + 1], f, from + (i ^ OWN * half) * ROWS + R::Q, R::TILE);
            }
        }
#pragma unroll
        for (int j = 0; j < C / 8; j++) sums[j * THREADS_HERE + threadIdx.x] = quad(KS[j]);
#pragma unroll
        for (int j = 0; j < 2 * OWN; j++) of_queries[j * THREADS_HERE + threadIdx.x] = quad(O[2 * OWN + j]);
        __syncthreads();  // halves of sums are there
        float deltas[C / 8][4], U[C / 8][4];
        clear(U);
#pragma unroll
        for (int j = 0; j < C / 8; j++) {
            const float2 rise = CHANNELS ? make_float2(1, 1) : *(const float2 *)(factors + 8 * j);
            add(KS[j], sums[j * THREADS_HERE + other]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                deltas[j][e] = V[(8 * j + e % 2) * V_STEP + e / 2 * 8] - (e % 2 ? rise.y : rise.x) * KS[j][e];
        }
#pragma unroll
        for (int j = 0; j < 2 * OWN; j++) {
            const float2 rise = CHANNELS ? make_float2(1, 1) : *(const float2 *)(factors + 16 * OWN * half + 8 * j);
            add(O[j], of_queries[j * THREADS_HERE + other]);
#pragma unroll
            for (int e = 0; e < 4; e++) O[j][e] *= e % 2 ? rise.y : rise.x;
        }
#pragma unroll
        for (int k = 0; k < SIDE; k++) {
            const Left f = left_of<EXACT>(deltas[2 * k], deltas[2 * k + 1]);
#pragma unroll
            for (int p = k; p < SIDE; p++)
                multiply_rows<EXACT>(U[2 * p], U[2 * p + 1], f, squares + below(p, k), R::SQUARE);
        }

        const float fall = factors[C - 1 - column];
#pragma unroll
        for (int j = 0; j < HALF / 8; j++) {
            const float2 falls = CHANNELS ? *(const float2 *)(factors + first + 8 * j) : make_float2(fall, fall);
#pragma unroll
            for (int e = 0; e < 4; e++) S[j][e] *= e % 2 ? falls.y : falls.x;
        }
#pragma unroll
        for (int k = 0; k < SIDE; k++) {
            Left f = left_of<EXACT>(U[2 * k], U[2 * k + 1]);
#pragma unroll
            for (int o = 0; o < OWN; o++)
                if (k <= OWN * half + o)
                    multiply_rows<EXACT>(O[2 * o], O[2 * o + 1], f, squares + R::P + below(OWN * half + o, k), R::SQUARE);
            if (!CHANNELS) {
#pragma unroll
                for (int j = 2 * k; j < 2 * k + 2; j++) {
                    const float2 falls = *(const float2 *)(factors + C + 8 * j);
                    U[j][0] *= falls.x, U[j][1] *= falls.y, U[j][2] *= falls.x, U[j][3] *= falls.y;
                }
                f = left_of<EXACT>(U[2 * k], U[2 * k + 1]);
            }
#pragma unroll
            for (int p = 0; p < HALF / 16; p++) {
                const char *from = keys + R::RECEIVED + (in_columns ^ 32 * p) + k * ROWS;
                multiply_columns<EXACT>(S[2 * p], S[2 * p + 1], f, from, R::TILE);
            }
        }
        const int left = tokens - chunk * C - 16 * OWN * half - column;
#pragma unroll
        for (int j = 0; j < 2 * OWN; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * j + e < left) {
                    float *at = out + (8 * j + e) * a.out.token;
                    at[0] = O[j][e], at[8 * a.out.element] = O[j][2 + e];
                }
        out += C * a.out.token;
    }

    float *kept = a.kept.at + a.kept.row(n * a.kept_step) * state_size + inside;
#pragma unroll
    for (int j = 0; j < HALF / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) *(float2 *)(kept + 4 * e * D + 8 * j) = make_float2(S[j][e], S[j][e + 1]);
}

template <int D, int C, int BV, bool CHANNELS, bool EXACT>
__global__ void __launch_bounds__(4 * BV, 1) delta_scan(const __grid_constant__ Scan a) {
    wait_for_earlier();
    scan<ByThreads<D, C, BV, CHANNELS, EXACT>, D, C, BV, CHANNELS, EXACT>(a);
}
