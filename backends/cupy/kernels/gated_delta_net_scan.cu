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


template <int THREADS_HERE>
__device__ __forceinline__ void copy_async(char *to, const char *from, int bytes) {
    for (int i = threadIdx.x * 16; i < bytes; i += THREADS_HERE * 16) cp_async_16(to + i, from + i);
}

// A block carries BV rows of a head's state, a warp 16 of them, through all chunks.  All products are transposed
// (value rows x tokens), so that what one product gives is the left operand of the next, in the same registers: warps
// share nothing but the tiles, and meet once a chunk.
template <int D, int C, int BV, bool CHANNELS, bool EXACT>
__global__ void __launch_bounds__(2 * BV, 1) delta_scan(const __grid_constant__ Scan a) {
    wait_for_earlier();
    using R = Record<D, C, CHANNELS, EXACT>;
    constexpr int THREADS_HERE = 2 * BV, V_STEP = BV + 4, STAGE = R::KEYS + R::HEADS + 4 * C * V_STEP;
    DYNAMIC_SHARED(shared, char);
    const int lane = threadIdx.x % 32, local = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
    const int tokens = (int)a.tokens, chunks = (tokens + C - 1) / C, row = blockIdx.x * BV + local;
    const i64 h = blockIdx.y, n = blockIdx.z, key_record = a.run ? h / a.run : h % a.key_records;
    const i64 state_size = a.value_heads * a.value_size * D, inside = (h * a.value_size + row) * D;

    if (!has_states(a.from, a.kept, n, n * a.kept_step, 1, a.fault)) return;

    auto fetch = [&](int chunk) {
        char *stage = shared + chunk % 2 * STAGE;
        const i64 at = n * chunks + chunk;
        copy_async<THREADS_HERE>(stage, a.keys + (at * a.key_records + key_record) * R::KEYS, R::KEYS);
        copy_async<THREADS_HERE>(stage + R::KEYS, a.heads + (at * a.value_heads + h) * R::HEADS, R::HEADS);
        float *V = (float *)(stage + R::KEYS + R::HEADS);
        const float *values = a.v.row(n, chunk * C, h) + blockIdx.x * BV;
        const int left = tokens - chunk * C;
        for (int i = threadIdx.x; i < C * BV / 4; i += THREADS_HERE) {
            const int r = i / (BV / 4), c = i % (BV / 4) * 4;
            if (r < left)
                cp_async_16(V + r * V_STEP + c, values + r * a.v.token + c);
            else
                *(float4 *)(V + r * V_STEP + c) = make_float4(0, 0, 0, 0);
        }
        cp_async_commit();
    };
    fetch(0);

    const float *old = a.from.at(n, state_size) + inside;
    float S[D / 8][4];
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const float2 x = *(const float2 *)(old + 4 * e * D + 8 * j + column);
            S[j][e] = x.x, S[j][e + 1] = x.y;
        }

    for (int chunk = 0; chunk < chunks; chunk++) {
        cp_async_wait<0>();
        __syncthreads();  // the stage is complete, and nobody reads the other one any more
        if (chunk + 1 < chunks) fetch(chunk + 1);
        const char *keys = shared + chunk % 2 * STAGE, *heads = keys + R::KEYS;
        const float *factors = (const float *)(heads + R::FACTORS), *V = (const float *)(heads + R::HEADS);

        float KS[C / 8][4], O[C / 8][4];
        clear(KS), clear(O);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            const Left f = left_of<EXACT>(S[2 * k], S[2 * k + 1]);
#pragma unroll
            for (int p = 0; p < C / 16; p++) {
                multiply_rows<EXACT, D / 8>(KS[2 * p], KS[2 * p + 1], f, keys, R::TILE, 16 * p, 16 * k);
                multiply_rows<EXACT, D / 8>(O[2 * p], O[2 * p + 1], f, keys + R::Q, R::TILE, 16 * p, 16 * k);
            }
        }
#pragma unroll
        for (int j = 0; j < C / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int t = 8 * j + column + e % 2;
                const float rise = CHANNELS ? 1.f : factors[t];
                KS[j][e] = V[t * V_STEP + local + e / 2 * 8] - rise * KS[j][e];
                O[j][e] *= rise;
            }

        float U[C / 8][4];
        clear(U);
#pragma unroll
        for (int k = 0; k < C / 16; k++) {
            const Left f = left_of<EXACT>(KS[2 * k], KS[2 * k + 1]);
#pragma unroll
            for (int p = k; p < C / 16; p++)
                multiply_rows<EXACT, 2>(U[2 * p], U[2 * p + 1], f, heads + below(p, k), R::SQUARE, 0, 0);
        }

#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) S[j][e] *= factors[CHANNELS ? 8 * j + column + e % 2 : C - 1];
#pragma unroll
        for (int k = 0; k < C / 16; k++) {
            Left f = left_of<EXACT>(U[2 * k], U[2 * k + 1]);
#pragma unroll
            for (int p = k; p < C / 16; p++)
                multiply_rows<EXACT, 2>(O[2 * p], O[2 * p + 1], f, heads + R::P + below(p, k), R::SQUARE, 0, 0);
            if (!CHANNELS) {
#pragma unroll
                for (int e = 0; e < 8; e++) U[2 * k + e / 4][e % 4] *= factors[C + 16 * k + e / 4 * 8 + column + e % 2];
                f = left_of<EXACT>(U[2 * k], U[2 * k + 1]);
            }
#pragma unroll
            for (int p = 0; p < D / 16; p++)
                multiply_columns<EXACT, D / 8>(S[2 * p], S[2 * p + 1], f, keys + R::RECEIVED, R::TILE, 16 * k, 16 * p);
        }
        float *out = a.out.row(n, chunk * C + column, h) + row * a.out.element;
        const int left = tokens - chunk * C - column;
#pragma unroll
        for (int j = 0; j < C / 8; j++, out += 8 * a.out.token)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (8 * j + e % 2 < left) out[e % 2 * a.out.token + e / 2 * 8 * a.out.element] = O[j][e];
    }

    float *kept = a.kept.at + a.kept.row(n * a.kept_step) * state_size + inside;
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) *(float2 *)(kept + 4 * e * D + 8 * j + column) = make_float2(S[j][e], S[j][e + 1]);
}
