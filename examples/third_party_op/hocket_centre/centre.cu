// y = x - mean(x), a block for each row; the prelude of hocket stands before this file.

struct Centre { i64 columns; const float *x; float *y; };
__global__ void centre(const __grid_constant__ Centre a) {
    SHARED(room, float[32]);
    const float *x = a.x + blockIdx.x * a.columns;
    float *y = a.y + blockIdx.x * a.columns, sum = 0.0f;
    for (i64 c = threadIdx.x; c < a.columns; c += blockDim.x) sum += x[c];
    const float mean = block_sum(sum, room) / (float)a.columns;
    for (i64 c = threadIdx.x; c < a.columns; c += blockDim.x) y[c] = x[c] - mean;
}
