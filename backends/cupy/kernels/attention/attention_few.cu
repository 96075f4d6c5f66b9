// Few rows: key by key, each key by some lanes of a warp.

// Four columns from `c` of a row of `n`; vectors where rows are dense and aligned.
template <bool dense, class From> __device__ __forceinline__ float4 four(const From row, i64 step, int c, int n) {
    if (dense) return c < n ? four_cells(row + c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = c + i < n ? to_float(row[(c + i) * step]) : 0.0f;
    return make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ float dot(float4 x, float4 y, float sum) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

// `lanes` lanes share a key, of which each holds `k4` fours of columns, and `v4` of a value; k4 is 0 for any size.  Blocks
// are splits; row groups, key heads and, where values are wider than `lanes` hold, runs of columns; batches.
template <int lanes, int k4, int v4, int rows, bool dense, class Cell>
__global__ void __launch_bounds__(THREADS, 1) attend_few(const __grid_constant__ Args a) {
    wait_for_earlier();
    constexpr int at_once = 32 / lanes, unroll = rows * v4 >= (dense ? 32 : 16) ? 1 : 2, step = at_once * unroll, columns = 4 * lanes * v4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = 4 * (lane % lanes), sub = lane / lanes;
    const int row_groups = ((int)(a.tokens * a.shared) + rows - 1) / rows, first_row = blockIdx.y % row_groups * rows;
    const int group = blockIdx.y / row_groups % (int)a.groups, first_column = blockIdx.y / row_groups / (int)a.groups * columns;
    const int batch = blockIdx.z, split = blockIdx.x, size = (int)a.size, width = (int)a.width, key_count = (int)a.keys;
    const CellReader<Cell> keys = a.k.cells<Cell>(batch, group), values = a.v.cells<Cell>(batch, group);
    const float scale = (float)a.scale, cap = (float)a.cap;

    SHARED(queries, float[rows][k4 ? 4 * lanes * k4 : 4]);
    SHARED(query, const float *[rows]);
    SHARED(biases, Bias[rows]);
    if (threadIdx.x < rows) {
        const Row row = row_of(a, batch, group, first_row + threadIdx.x);
        query[threadIdx.x] = query_of(a, batch, row);
        biases[threadIdx.x] = bias_of(a, batch, row);
    }
    __syncthreads();
    if (k4) {
        for (int i = threadIdx.x; i < rows * 4 * lanes * k4; i += THREADS) {
            const int r = i / (4 * lanes * max(k4, 1)), c = i % (4 * lanes * max(k4, 1));
            queries[r][c] = c < size ? query[r][c * a.q.column] : 0.0f;
        }
        __syncthreads();
    }
    float top[rows], sum[rows];
    float4 acc[rows][v4];
#pragma unroll
    for (int r = 0; r < rows; r++) {
        top[r] = LOWEST, sum[r] = 0.0f;
#pragma unroll
        for (int c = 0; c < v4; c++) acc[r][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    const int fours = k4 ? k4 : (size + 4 * lanes - 1) / (4 * lanes);
    for (int first = 32 * (WARPS * split + warp); first < key_count; first += 32 * WARPS * (int)a.splits) {
        float bias[rows];  // of key `lane`
        bool sees = false;
#pragma unroll
        for (int r = 0; r < rows; r++) {
            bias[r] = bias_at(a, biases[r], first + lane);
            sees |= bias[r] != -INFINITY;
        }
        const u32 seen = __ballot_sync(ALL_LANES, sees);
        for (int s = 0; s < 32; s += step) {
            if ((seen >> s & (u32)((1ull << step) - 1)) == 0) continue;
            CellReader<Cell> key[unroll], from[unroll];
            float4 value[unroll][v4];
            const auto fetch = [&] {
#pragma unroll
                for (int u = 0; u < unroll; u++)
#pragma unroll
                    for (int c = 0; c < v4; c++)
                        value[u][c] = four<dense>(from[u], a.v.column, first_column + mine + 4 * lanes * c, width);
            };
            float score[unroll][rows] = {};
#pragma unroll
            for (int u = 0; u < unroll; u++) {
                const i64 which = min(first + s + u * at_once + sub, key_count - 1);
                key[u] = keys + which * a.k.row;
                from[u] = values + which * a.v.row;
            }
            if (rows < 8) fetch();  // on its way while scores are made, where registers allow
#pragma unroll(k4 == 0 || rows == 8 ? 1 : 8)
            for (int c = 0; c < fours; c++) {
                const int at = mine + 4 * lanes * c;
                float4 k[unroll];
#pragma unroll
                for (int u = 0; u < unroll; u++) k[u] = four<dense>(key[u], a.k.column, at, size);
#pragma unroll
                for (int r = 0; r < rows; r++) {
                    const float4 q = k4 ? *(const float4 *)&queries[r][at] : four<false>(query[r], a.q.column, at, size);
#pragma unroll
                    for (int u = 0; u < unroll; u++) score[u][r] = dot(q, k[u], score[u][r]);
                }
            }
            if (rows == 8) fetch();
#pragma unroll
            for (int r = 0; r < rows; r++) {
                float high = top[r];
#pragma unroll
                for (int u = 0; u < unroll; u++) {
#pragma unroll
                    for (int by = lanes / 2; by > 0; by >>= 1) score[u][r] += __shfl_xor_sync(ALL_LANES, score[u][r], by);
                    const float extra = __shfl_sync(ALL_LANES, bias[r], s + u * at_once + sub);
                    score[u][r] *= scale;
                    if (cap > 0.0f) score[u][r] = cap * tanhf(score[u][r]);
                    score[u][r] += extra;
                    high = fmaxf(high, score[u][r]);
                }
                if (high > top[r]) {
                    const float fade = grown(top[r] - high);
                    top[r] = high;
                    sum[r] *= fade;
#pragma unroll
                    for (int c = 0; c < v4; c++)
                        acc[r][c].x *= fade, acc[r][c].y *= fade, acc[r][c].z *= fade, acc[r][c].w *= fade;
                }
#pragma unroll
                for (int u = 0; u < unroll; u++) {
                    const float p = grown(score[u][r] - top[r]);
                    sum[r] += p;
#pragma unroll
                    for (int c = 0; c < v4; c++) {
                        const float4 v = value[u][c];
                        acc[r][c].x = fmaf(p, v.x, acc[r][c].x), acc[r][c].y = fmaf(p, v.y, acc[r][c].y);
                        acc[r][c].z = fmaf(p, v.z, acc[r][c].z), acc[r][c].w = fmaf(p, v.w, acc[r][c].w);
                    }
                }
            }
        }
    }

    // Row by row: keys of a warp, then warps.
    SHARED(sums, float[WARPS][columns]);
    SHARED(states, float2[WARPS]);
#pragma unroll
    for (int r = 0; r < rows; r++) {
        float high = top[r];
#pragma unroll
        for (int by = lanes; by < 32; by <<= 1) high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, by));
        const float fade = grown(top[r] - high);
        sum[r] *= fade;
#pragma unroll
        for (int by = lanes; by < 32; by <<= 1) sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], by);
#pragma unroll
        for (int c = 0; c < v4; c++) {
            float x[4] = {acc[r][c].x * fade, acc[r][c].y * fade, acc[r][c].z * fade, acc[r][c].w * fade};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int by = lanes; by < 32; by <<= 1) x[i] += __shfl_xor_sync(ALL_LANES, x[i], by);
            if (sub == 0) *(float4 *)&sums[warp][mine + 4 * lanes * c] = make_float4(x[0], x[1], x[2], x[3]);
        }
        if (lane == 0) states[warp] = make_float2(high, sum[r]);
        __syncthreads();
        const Row row = row_of(a, batch, group, first_row + r);
        float all = LOWEST, total = 0.0f, part[WARPS];
        for (int w = 0; w < WARPS; w++) all = fmaxf(all, states[w].x);
        for (int w = 0; w < WARPS; w++) part[w] = grown(states[w].x - all), total += part[w] * states[w].y;
        const float share = a.splits > 1 ? 1.0f : share_of(a, row.head, all, total);
        float *target = target_of(a, batch, row, split);
        for (int c = threadIdx.x; row.real && c < columns && first_column + c < width; c += THREADS) {
            float x = 0.0f;
            for (int w = 0; w < WARPS; w++) x = fmaf(part[w], sums[w][c], x);
            target[first_column + c] = x * share;
        }
        if (row.real && a.splits > 1 && threadIdx.x == 0 && first_column == 0) keep_state(a, row, split, all, total);
        __syncthreads();
    }
}
