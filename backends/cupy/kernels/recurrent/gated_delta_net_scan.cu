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


// `to` and `from` are where the first bytes of this thread lie.
template <int THREADS_HERE, int BYTES>
__device__ __forceinline__ void copy_async(char *to, const char *from) {
#pragma unroll
    for (int i = 0; i < BYTES; i += THREADS_HERE * 16)
        if (i + THREADS_HERE * 16 <= BYTES || (int)threadIdx.x < (BYTES - i) / 16) cp_async_16(to + i, from + i);
}

__device__ __forceinline__ float4 quad(const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }
__device__ __forceinline__ void add(float (&x)[4], float4 y) { x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w; }

// A block carries BV rows of a head's state through all chunks; two warps share 16 of them, and have half of the keys
// each.  All products are transposed (value rows x tokens), so that what one product gives is the left operand of the
// next, in the same registers.  Of the products with the state each warp has half a sum.  Once a chunk the two exchange
// K S, with all of which both go on, and Q S of the 16 tokens whose outputs the other one finishes.
template <int D, int C, int BV, bool CHANNELS, bool EXACT>
__global__ void __launch_bounds__(4 * BV, 1) delta_scan(const __grid_constant__ Scan a) {
    wait_for_earlier();
    using R = Record<D, C, CHANNELS, EXACT>;
    constexpr int THREADS_HERE = 4 * BV, HALF = D / 2, SIDE = C / 16, ROWS = 16 * D * 2;
    constexpr int V_STEP = BV + 4, STAGE = R::KEYS + R::HEADS + 4 * C * V_STEP;
    constexpr int STAGES = EXACT || CHANNELS || BV > 32 ? 2 : 3;  // what all devices have room for
    static_assert(C == 32, "two warps finish 16 tokens each");
    DYNAMIC_SHARED(shared, char);
    float4 *sums = (float4 *)(shared + STAGES * STAGE), *of_queries = sums + C / 8 * THREADS_HERE;
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2, first = half * HALF;
    const int local = threadIdx.x / 64 * 16 + lane / 4, column = lane % 4 * 2, row = blockIdx.x * BV + local;
    const int tokens = (int)a.tokens, chunks = (tokens + C - 1) / C;
    const i64 h = blockIdx.y, n = blockIdx.z, key_record = a.run ? h / a.run : h % a.key_records;
    const i64 state_size = a.value_heads * a.value_size * D, inside = (h * a.value_size + row) * D + first + column;

    if (!has_states(a.from, a.kept, n, n * a.kept_step, 1, a.fault)) return;

    const int mine = threadIdx.x * 16, copied = threadIdx.x / (BV / 4), beside = threadIdx.x % (BV / 4) * 4;
    const char *next_keys = a.keys + (n * chunks * a.key_records + key_record) * R::KEYS + mine;
    const char *next_heads = a.heads + (n * chunks * a.value_heads + h) * R::HEADS + mine;
    const float *next_values = a.v.row(n, copied, h) + blockIdx.x * BV + beside;
    char *to = shared + mine;
    auto fetch = [&](int chunk) {
        copy_async<THREADS_HERE, R::KEYS>(to, next_keys);
        copy_async<THREADS_HERE, R::HEADS>(to + R::KEYS, next_heads);
        float *V = (float *)(to + R::KEYS + R::HEADS - mine) + copied * V_STEP + beside;
        const int left = tokens - chunk * C - copied;
#pragma unroll
        for (int r = 0; r < C; r += 16, next_values += 16 * a.v.token)
            if (r < left)
                cp_async_16(V + r * V_STEP, next_values);
            else
                *(float4 *)(V + r * V_STEP) = make_float4(0, 0, 0, 0);
        to += chunk % STAGES == STAGES - 1 ? (1 - STAGES) * STAGE : STAGE;
        next_keys += a.key_records * R::KEYS, next_heads += a.value_heads * R::HEADS;
    };
#pragma unroll
    for (int chunk = 0; chunk < STAGES - 1; chunk++) {
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

    int rows[HALF / 16], columns[HALF / 16];  // of the keys
#pragma unroll
    for (int k = 0; k < HALF / 16; k++)
        rows[k] = by_rows<D / 8>(0, first + 16 * k), columns[k] = by_columns<D / 8>(0, first + 16 * k);
    const int in_square = by_rows<2>(0, 0);
    float *out = a.out.row(n, 16 * half + column, h) + row * a.out.element;

    for (int chunk = 0; chunk < chunks; chunk++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is complete, and nobody reads the one before any more
        if (chunk + STAGES - 1 < chunks) fetch(chunk + STAGES - 1);
        cp_async_commit();
        const char *keys = shared + chunk % STAGES * STAGE, *heads = keys + R::KEYS, *squares = heads + in_square;
        const float *factors = (const float *)(heads + R::FACTORS) + column;
        const float *V = (const float *)(heads + R::HEADS) + column * V_STEP + local;

        float KS[C / 8][4], O[C / 8][4];  // first the tokens that this warp finishes
        clear(KS), clear(O);
#pragma unroll
        for (int k = 0; k < HALF / 16; k++) {
            const Left f = left_of<EXACT>(S[2 * k], S[2 * k + 1]);
#pragma unroll
            for (int i = 0; i < SIDE; i++) {
                const char *from = keys + rows[k] + (i ^ half) * ROWS;
                multiply_rows<EXACT>(KS[2 * i], KS[2 * i + 1], f, from, R::TILE);
                multiply_rows<EXACT>(O[2 * i], O[2 * i + 1], f, from + R::Q, R::TILE);
            }
        }
#pragma unroll
        for (int j = 0; j < C / 8; j++) {
            const bool is_own = j < 2;
            const int t = 16 * (j / 2 ^ half) + j % 2 * 8;
            const float2 rise = CHANNELS ? make_float2(1, 1) : *(const float2 *)(factors + t);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                KS[j][e] = (is_own ? V[(t + e % 2) * V_STEP + e / 2 * 8] : 0.f) - (e % 2 ? rise.y : rise.x) * KS[j][e];
                O[j][e] *= e % 2 ? rise.y : rise.x;
            }
            sums[t / 8 * THREADS_HERE + threadIdx.x] = quad(KS[j]);
            if (!is_own) of_queries[(j - 2) * THREADS_HERE + threadIdx.x] = quad(O[j]);
        }
        __syncthreads();  // halves of sums are there
        float deltas[C / 8][4], U[C / 8][4];
        clear(deltas), clear(U);
#pragma unroll
        for (int j = 0; j < C / 8; j++) {
            const float4 *both = sums + j * THREADS_HERE + (threadIdx.x & ~32);
            add(deltas[j], both[0]), add(deltas[j], both[32]);
            if (j < 2) add(O[j], of_queries[j * THREADS_HERE + (threadIdx.x ^ 32)]);
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
            if (k <= half) multiply_rows<EXACT>(O[0], O[1], f, squares + R::P + below(half, k), R::SQUARE);
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
                const char *from = keys + R::RECEIVED + columns[p] + k * ROWS;
                multiply_columns<EXACT>(S[2 * p], S[2 * p + 1], f, from, R::TILE);
            }
        }
        const int left = tokens - chunk * C - 16 * half - column;
#pragma unroll
        for (int j = 0; j < 2; j++)
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
