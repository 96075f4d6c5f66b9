// Kernels whose warps and blocks have different work, with one mistake each; without (NONE) each is right.  See test_roles.py.

enum {
    NONE,
    NOT_FULL,
    NOT_EMPTY,
    EMPTY_TOO_EARLY,
    OTHER_COUNT,
    HALF_WARP,
    BARRIER_0,
    BARRIER_16,
    OTHER_BARRIER,
    ONE_WARP_SHORT,
    LEFT_OVER,
    TWICE,
    ODD_REGISTERS,
    TAKES_FEWER,
    RELEASES_MORE,
    NOTHING_RELEASED,
    ONE_WARP_KEEPS,
    RELAXED,
    TOO_EARLY,
    NOT_TOGETHER,
    NOT_WAITED,
    NEVER,
    TOO_MANY,
};

struct Args {
    const float *x;
    float *out;
    float *between;
    u64 *word;
};
constexpr int ROUNDS = 4, GROUP = 128;
constexpr u32 FULL = 1, EMPTY = 2;

// Each round reverses 128 numbers: one warpgroup fills shared memory, the other one empties it.
template <int F> __global__ void exchanged(const __grid_constant__ Args a) {
    wait_for_earlier();
    DYNAMIC_SHARED(tile, float);
    const int i = threadIdx.x % GROUP;
    if (threadIdx.x < GROUP) {
        if (F == ODD_REGISTERS) release_registers<44>();
        else if (F == RELEASES_MORE) release_registers<256>();
        else if (F != NOTHING_RELEASED && (F != ONE_WARP_KEEPS || i >= 32)) release_registers<40>();
        for (int round = 0; round < ROUNDS; round++) {
            if (round && F != NOT_EMPTY) sync_named(EMPTY, 2 * GROUP);
            if (round && F == NOT_EMPTY) arrive_named(EMPTY, 2 * GROUP);
            tile[i] = a.x[round * GROUP + i];
            if (F == ONE_WARP_SHORT && i < 32) continue;
            arrive_named(F == BARRIER_0 ? 0 : F == BARRIER_16 ? 16 : F == OTHER_BARRIER ? 3 : FULL, F == NOT_FULL ? GROUP : 2 * GROUP);
            if (F == TWICE && i == 0) arrive_named(FULL, 2 * GROUP);
        }
    } else {
        if (F == TAKES_FEWER) take_registers<240>();
        else take_registers<256>();
        for (int round = 0; round < ROUNDS; round++) {
            if (F != NOT_FULL) sync_named(FULL, F == OTHER_COUNT ? 2 * GROUP - 32 : F == HALF_WARP ? 2 * GROUP - 6 : 2 * GROUP);
            if (F == EMPTY_TOO_EARLY && round < ROUNDS - 1) arrive_named(EMPTY, 2 * GROUP);
            a.out[round * GROUP + i] = tile[GROUP - 1 - i];
            if (F != EMPTY_TOO_EARLY && (round < ROUNDS - 1 || F == LEFT_OVER)) arrive_named(EMPTY, 2 * GROUP);
        }
    }
}

// The last of three blocks reverses what each of the others has doubled.
template <int F> __global__ void passed(const __grid_constant__ Args a) {
    wait_for_earlier();
    const int i = threadIdx.x, block = blockIdx.x;
    if (block < 2) {
        if (F == TOO_EARLY && i == 0) increment_for_device(a.word);
        a.between[block * GROUP + i] = 2 * a.x[block * GROUP + i];
        __syncthreads();
        if (i != 0 || F == TOO_EARLY || (F == NEVER && block == 0)) return;
        if (F == RELAXED) atomicAdd(a.word, (u64)1);
        else increment_for_device(a.word);
        return;
    }
    if (i == 0 && F != NOT_WAITED) wait_for_device(a.word, F == TOO_MANY ? 3 : 2);
    if (F != NOT_TOGETHER) __syncthreads();
    for (int n = 0; n < 2; n++) a.out[n * GROUP + i] = a.between[n * GROUP + GROUP - 1 - i];
}
