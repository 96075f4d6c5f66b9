// The second part of the gated delta rule by clusters of blocks that have rows of one state: what is prepared of a chunk
// they read once.  A thread of each block asks for the block's part of it, in two copies to all of them; it waits for no
// block, as what it writes over was read in the chunk before the last.

template <int D, int C, int BV, bool CHANNELS, bool EXACT>
struct ForAll {
    using R = Record<D, C, CHANNELS, EXACT>;
    using M = Room<D, C, BV, CHANNELS, EXACT>;
    static constexpr int STAGES = 4 * M::STAGE + M::SUMS <= 225 * 1024 ? 4 : 3, AHEAD = STAGES - 2;
    u64 *full, *empty;  // mbarriers
    int of_keys, of_heads;  // bytes of a part
    const char *keys, *heads;
    __device__ ForAll(const char *keys, const char *heads, char *memory)
        : full((u64 *)memory), empty(full + STAGES), of_keys(R::KEYS / cluster_size()), of_heads(R::HEADS / cluster_size()),
          keys(keys + cluster_rank() * of_keys), heads(heads + cluster_rank() * of_heads) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; s++) init_mbarrier(full + s, 1), init_mbarrier(empty + s, cluster_size());
            show_mbarriers();
        }
        sync_cluster();
    }
    __device__ void bring(const Scan &a, int chunk, char *stage) {
        if (threadIdx.x > 0) return;
        u64 *over = full + chunk % STAGES;
        const u32 all = (1 << cluster_size()) - 1;
        wait_for_phase(empty + chunk % STAGES, chunk / STAGES % 2 ^ 1);
        arrive_before(over, R::KEYS + R::HEADS);
        copy_to_blocks(stage + cluster_rank() * of_keys, keys, of_keys, over, all);
        copy_to_blocks(stage + R::KEYS + cluster_rank() * of_heads, heads, of_heads, over, all);
        keys += a.key_records * R::KEYS, heads += a.value_heads * R::HEADS;
    }
    __device__ void wait(int chunk) const { wait_for_phase(full + chunk % STAGES, chunk / STAGES % 2); }
    // Nobody of this block reads the stage any more.
    __device__ void release(int chunk) const {
        if (threadIdx.x < cluster_size()) arrive_at(empty + chunk % STAGES, threadIdx.x);
    }
};

template <int D, int C, int BV, bool CHANNELS, bool EXACT>
__global__ void __launch_bounds__(4 * BV, 1) delta_scan_clusters(const __grid_constant__ Scan a) {
    wait_for_earlier();
    scan<ForAll<D, C, BV, CHANNELS, EXACT>, D, C, BV, CHANNELS, EXACT>(a);
}
