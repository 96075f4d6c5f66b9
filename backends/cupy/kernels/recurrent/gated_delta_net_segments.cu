// The gated delta rule in segments of a prompt: the states with which their scans begin.

struct Segments {
    float *identity;       // [heads, size, size]
    const float *changes;  // of segments 1 to count - 2: what a state at the begin is multiplied by
    float *begins;         // of all segments [count, heads, values, size]; zeros before they are carried
    const float *ends;     // of segments 0 to count - 2, where all but the first begin with zeros
    float *no_values;      // zeros of a token
    i32 *is_later;         // of a segment: whether it is not the first
    i64 heads, values, size, count;
};

// Blocks are heads, segments.
__global__ void __launch_bounds__(256) begin_segments(const __grid_constant__ Segments a) {
    wait_for_earlier();
    const int head = blockIdx.x, segment = blockIdx.y, values = (int)a.values, size = (int)a.size, state = values * size;
    float *begin = a.begins + ((i64)segment * a.heads + head) * state, *identity = a.identity + (i64)head * state;
    for (int i = threadIdx.x; i < state; i += blockDim.x) begin[i] = 0.0f;
    if (head == 0 && threadIdx.x == 0) a.is_later[segment] = segment > 0;
    if (segment > 0) return;
    for (int i = threadIdx.x; i < state; i += blockDim.x) identity[i] = i / size == i % size ? 1.0f : 0.0f;
    if (head == 0)
        for (int i = threadIdx.x; i < values; i += blockDim.x) a.no_values[i] = 0.0f;
}

// A block carries ROWS rows of a head's state from segment to segment; a thread has a column.
template <int D> __global__ void __launch_bounds__(D) carry_segments(const __grid_constant__ Segments a) {
    wait_for_earlier();
    constexpr int ROWS = 16;
    SHARED(rows, float[ROWS][D]);
    const int column = threadIdx.x, count = (int)a.count;
    const i64 state = a.heads * a.values * D, here = (blockIdx.y * a.values + blockIdx.x * ROWS) * D + column;
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = a.ends[here + r * D];
    for (int segment = 1;; segment++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) rows[r][column] = a.begins[segment * state + here + r * D] = sum[r];
        if (segment + 1 == count) return;
        __syncthreads();  // all columns of the rows are there
        const float *change = a.changes + ((segment - 1) * a.heads + blockIdx.y) * D * D + column;
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] = a.ends[segment * state + here + r * D];
#pragma unroll 8
        for (int i = 0; i < D; i++) {
            const float x = change[i * D];
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[r] = fmaf(rows[r][i], x, sum[r]);
        }
        __syncthreads();  // the rows have been read
    }
}
