// Kernels with one mistake each, chosen at compile time; without (NONE) each is right.  See test_faults.py.

enum {
    NONE,
    NO_BARRIER,
    HALF_BARRIER,
    TWO_BARRIERS,
    EARLY_RETURN,
    READS_PAST,
    WRITES_PAST,
    WRITES_BEFORE,
    READS_BEFORE,
    SHARED_PAST,
    DYNAMIC_PAST,
    NEVER_WRITTEN,
    TAIL_LEFT,
    WRONG_LANE,
    WRONG_MASK,
    LANE_OUTSIDE,
    HALF_WARP,
    OTHER_OPERATION,
    NO_WAIT,
    WAITS_FOR_TOO_FEW,
    IN_FLIGHT,
    WRONG_FRAGMENT,
    MISALIGNED_ROW,
    MISALIGNED_VECTOR,
    DIVIDES_BY_0,
    DEEP_STACK,
    NULL_POINTER,
    ARRAY_PAST,
    OTHER_BLOCK,
};

struct Args {
    const float *x;
    float *out;
    i64 n;
};

// out[i] = x[n - 1 - i], through shared memory; one block of n threads.
template <int F> __global__ void reversed(const __grid_constant__ Args a) {
    SHARED(held, float[64]);
    DYNAMIC_SHARED(more, float);
    const int i = threadIdx.x, n = (int)a.n;
    if (F == EARLY_RETURN && i == 5) return;
    if (F != NEVER_WRITTEN || i != 7) held[F == SHARED_PAST ? i + 1 : i] = a.x[F == READS_PAST ? i + 1 : F == READS_BEFORE ? i - 1 : i];
    more[F == DYNAMIC_PAST ? i + 1 : i] = held[i];
    if (F == HALF_BARRIER) {
        if (i < 32) __syncthreads();
    } else if (F == TWO_BARRIERS) {
        if (i < 32) __syncthreads();
        else
            __syncthreads();
    } else if (F != NO_BARRIER) {
        __syncthreads();
    }
    if (F == TAIL_LEFT && i >= n - 3) return;
    a.out[F == WRITES_PAST ? i + 1 : F == WRITES_BEFORE ? i - 1 : i] = more[n - 1 - i];
}

// out[i] = sum of x, over each warp.
template <int F> __global__ void summed(const __grid_constant__ Args a) {
    const int i = threadIdx.x;
    float x = a.x[i];
    if (F == HALF_WARP && i % 32 >= 16) return;
    for (int by = 16; by > 0; by >>= 1) {
        const u32 mask = F == WRONG_MASK ? 0x0000ffffu : ALL_LANES;
        if (F == OTHER_OPERATION && i == 3 && by == 4) __syncwarp();
        x += __shfl_xor_sync(mask, x, F == WRONG_LANE && by == 2 ? 4 : by);
    }
    if (F == LANE_OUTSIDE && i % 32 < 16) x = __shfl_sync(0xffffu, x, 16);
    a.out[i] = x;
}

// out = x, through shared memory and copies that arrive later; one block of n / 4 threads.
template <int F> __global__ void fetched(const __grid_constant__ Args a) {
    SHARED(held, float[256]);
    const int i = 4 * threadIdx.x;
    cp_async_16(&held[i], a.x + i);
    cp_async_commit();
    if (F == WAITS_FOR_TOO_FEW) cp_async_wait<1>();
    else if (F != NO_WAIT && F != IN_FLIGHT) cp_async_wait<0>();
    __syncthreads();
    for (int e = 0; e < 4; e++) a.out[i + e] = F == IN_FLIGHT ? 0.0f : held[i + e];
    if (F == NO_WAIT || F == WAITS_FOR_TOO_FEW) cp_async_wait<0>();
}

// out[16, 8] = x[16, 16] (x[16, 8] behind it), one warp.
template <int F> __global__ void multiplied(const __grid_constant__ Args a) {
    SHARED(rows, u16[16][24]);
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += 32) rows[i / 16][i % 16] = float_to_bf16(a.x[i]);
    __syncwarp();
    u32 left[4], right[2];
    ldmatrix_x4(left, &rows[lane % 16][lane / 16 * 8 + (F == MISALIGNED_ROW)]);
    for (int r = 0; r < 2; r++) right[r] = pack_bf16(a.x[256 + (2 * t + 8 * r) * 8 + g], a.x[256 + (2 * t + 1 + 8 * r) * 8 + g]);
    if (F == WRONG_FRAGMENT) { const u32 kept = left[1]; left[1] = left[2]; left[2] = kept; }
    float d[4] = {};
    mma_bf16(d, left, right);
    for (int r = 0; r < 4; r++) a.out[(g + 8 * (r / 2)) * 8 + 2 * t + r % 2] = d[r];
}

// out = x, one element a thread, in several blocks.
template <int F> __global__ void copied(const __grid_constant__ Args a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.n) return;
    if (F == MISALIGNED_VECTOR) {
        const float4 four = *(const float4 *)(a.x + 1);
        a.out[0] = four.x + four.y;
    }
    if (F == DIVIDES_BY_0) a.out[i] = (float)(i / ((int)a.n - (int)blockDim.x - 18));
    if (F == NULL_POINTER) a.out[i] = *(volatile float *)nullptr;
    if (F == DEEP_STACK) {
        volatile float deep[1 << 15];
        deep[i] = 1.0f;
    }
    if (F == ARRAY_PAST) {
        float few[4] = {};
        few[i % 8] = a.x[i];
        a.out[i] = few[(i + 1) % 8];
    }
    a.out[i] = a.x[i];
    if (F == OTHER_BLOCK && blockIdx.x == 1) a.out[i] = a.out[i - blockDim.x] + a.x[i] - a.x[i - blockDim.x];
}
