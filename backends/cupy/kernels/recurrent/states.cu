// States of recurrences in pools.

// Before a pool is updated in place: a state that another sequence will overwrite is copied aside, since blocks run in any
// order; all others stay where they are.  One block per sequence.
struct Shelter {
    States old, kept;  // slots of a sequence: one, and `snapshots`
    float *aside;
    int *moved;
    i64 sequences, snapshots, stored, state_size;
};

__global__ void __launch_bounds__(256) shelter(const __grid_constant__ Shelter a) {
    wait_for_earlier();
    SHARED(room, float[32]);
    const i64 n = blockIdx.x, slot = a.old.row(n);
    float others = 0;
    for (i64 i = threadIdx.x; i < a.sequences * a.snapshots; i += blockDim.x)
        if (i / a.snapshots != n && i % a.snapshots < a.stored && a.kept.row(i) == slot) others = 1;
    const bool moves = block_max(others, room) > 0 && slot >= 0 && slot < a.old.count;
    if (threadIdx.x == 0) a.moved[n] = moves;
    if (!moves) return;
    for (i64 i = threadIdx.x; i < a.state_size; i += blockDim.x) a.aside[n * a.state_size + i] = a.old.at[slot * a.state_size + i];
}
