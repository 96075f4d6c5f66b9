// Entries sorted by the matrix they take, and the tiles of up to `size` that they make; a matrix of elsewhere is -1.

struct Routes {
    i64 entries, size, count;
    int4 *tiles;  // [count]: matrix, first entry, entries; what is left over has no entries
    i32 *order;
    Choice choice;
};
__global__ void __launch_bounds__(1024) routes(const __grid_constant__ Routes a) {
    wait_for_earlier();
    DYNAMIC_SHARED(counts, i32);  // of each matrix, last of those elsewhere; then where the next entry goes
    const i32 here = (i32)a.choice.matrices, size = (i32)a.size;
    i32 *next = counts + here + 1;
    for (i64 i = threadIdx.x; i <= here; i += blockDim.x) counts[i] = 0;
    for (i64 i = threadIdx.x; i < a.count; i += blockDim.x) a.tiles[i] = make_int4(0, 0, 0, 0);
    __syncthreads();
    for (i64 i = threadIdx.x; i < a.entries; i += blockDim.x) {
        a.choice.check(i);
        const i64 matrix = a.choice.matrix_of(i);
        atomicAdd(&counts[matrix < 0 ? here : matrix], 1);
    }
    __syncthreads();
    for (i32 e = threadIdx.x; e <= here; e += blockDim.x) {
        i32 start = 0, tile = 0;
        for (i32 i = 0; i < e; i++) start += counts[i], tile += (counts[i] + size - 1) / size;
        next[e] = start;
        for (i32 i = 0; i < counts[e]; i += size) a.tiles[tile++] = make_int4(e < here ? e : -1, start + i, min(size, counts[e] - i), 0);
    }
    __syncthreads();
    // In any order within a matrix: no entry's result depends on its neighbours.
    for (i64 i = threadIdx.x; i < a.entries; i += blockDim.x) {
        const i64 matrix = a.choice.matrix_of(i);
        a.order[atomicAdd(&next[matrix < 0 ? here : matrix], 1)] = (i32)i;
    }
}
