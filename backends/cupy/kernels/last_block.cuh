// Whether this block is the last of `count` that come here; then it sees what the others left.
__device__ __forceinline__ bool comes_last(u32 *word, int count, u32 &number) {
    __syncthreads();
    if (threadIdx.x == 0) number = take_number(word);
    __syncthreads();
    if ((int)number + 1 != count) return false;
    if (threadIdx.x == 0) *word = 0;
    return true;
}
