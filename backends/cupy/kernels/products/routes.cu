// Entries sorted by the matrix they take, and the tiles of up to `size` that they make; a matrix of elsewhere is -1.

struct Routes {
    i64 entries, size, count;
    int4 *tiles;  // [count]: matrix, first entry, entries; what is left over has no entries
    i32 *order;
    Choice choice;
};
// A block of whole warps: numbers from 0 on of what threads have, and the sum of all in `total`.
__device__ __forceinline__ int2 before(int2 mine, int2 *room, int2 &total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto up_to = [&](int2 x) {
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int first = __shfl_up_sync(ALL_LANES, x.x, by), second = __shfl_up_sync(ALL_LANES, x.y, by);
            if (lane >= by) x.x += first, x.y += second;
        }
        return x;
    };
    const int2 sum = up_to(mine);
    if (lane == 31) room[warp] = sum;
    __syncthreads();
    const int2 warps = up_to(lane < (int)blockDim.x / 32 ? room[lane] : make_int2(0, 0));
    const int2 earlier = {__shfl_sync(ALL_LANES, warps.x, (warp + 31) % 32), __shfl_sync(ALL_LANES, warps.y, (warp + 31) % 32)};
    total = {__shfl_sync(ALL_LANES, warps.x, 31), __shfl_sync(ALL_LANES, warps.y, 31)};
    __syncthreads();
    return {sum.x - mine.x + (warp > 0 ? earlier.x : 0), sum.y - mine.y + (warp > 0 ? earlier.y : 0)};
}
__global__ void __launch_bounds__(1024) routes(const __grid_constant__ Routes a) {
    wait_for_earlier();
    DYNAMIC_SHARED(counts, i32);  // of each matrix, last of those elsewhere; then where the next entry goes
    SHARED(room, int2[32]);
    const i32 here = (i32)a.choice.matrices, size = (i32)a.size;
    for (i32 e = threadIdx.x; e <= here; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (i64 i = threadIdx.x; i < a.entries; i += blockDim.x) {
        a.choice.check(i);
        const i64 matrix = a.choice.matrix_of(i);
        atomicAdd(&counts[matrix < 0 ? here : matrix], 1);
    }
    __syncthreads();
    int2 done = make_int2(0, 0);  // entries and tiles
    for (i32 first = 0; first <= here; first += blockDim.x) {
        const i32 e = first + threadIdx.x, count = e <= here ? counts[e] : 0;
        int2 total;
        const int2 earlier = before(make_int2(count, (count + size - 1) / size), room, total);
        const i32 start = done.x + earlier.x;
        i32 tile = done.y + earlier.y;
        if (e <= here) counts[e] = start;
        for (i32 i = 0; i < count; i += size) a.tiles[tile++] = make_int4(e < here ? e : -1, start + i, min(size, count - i), 0);
        done.x += total.x, done.y += total.y;
    }
    for (i64 i = done.y + threadIdx.x; i < a.count; i += blockDim.x) a.tiles[i] = make_int4(0, 0, 0, 0);
    __syncthreads();
    // In any order within a matrix: no entry's result depends on its neighbours.
    for (i64 i = threadIdx.x; i < a.entries; i += blockDim.x) {
        const i64 matrix = a.choice.matrix_of(i);
        a.order[atomicAdd(&counts[matrix < 0 ? here : matrix], 1)] = (i32)i;
    }
}
