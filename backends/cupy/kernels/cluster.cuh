// What clusters of blocks use besides cuda.cuh, on architecture sm_90a alone, in the same way: inline PTX on a device, the
// emulation's version elsewhere.  Blocks of a cluster run at the same time.
//
// An mbarrier is a word of shared memory at which threads arrive, of any block of the cluster, and bytes of copies.  Once
// all are there that it counts, a phase is over and the next begins; who waits says the parity of the phase that has to be
// over, and that before the first one is 1.  What those did that arrived is done then, and the copies are there.

// This block's number among those of its cluster, and how many they are.
__device__ __forceinline__ u32 cluster_rank() {
#ifdef HOCKET_EMULATED
    return emulation::current->worker->rank;
#else
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#endif
}
__device__ __forceinline__ u32 cluster_size() {
#ifdef HOCKET_EMULATED
    return emulation::current->worker->cluster->size;
#else
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
#endif
}
// A barrier of all threads of all blocks of the cluster.
__device__ __forceinline__ void sync_cluster() {
#ifdef HOCKET_EMULATED
    emulation::sync_cluster();
#else
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void init_mbarrier(u64 *mbarrier, u32 arrivals) {
#ifdef HOCKET_EMULATED
    emulation::init_mbarrier(mbarrier, arrivals);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(arrivals) : "memory");
#endif
}
// Stands between the begin of mbarriers and a barrier of the cluster, behind which others and copies arrive at them.
__device__ __forceinline__ void show_mbarriers() {
#ifdef HOCKET_EMULATED
    emulation::show_mbarriers();
#else
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Arrive at the mbarrier that block `rank` has in this place.  CUTLASS names neither order nor scope here (ClusterBarrier),
// and nor do we: PTX then orders it for threads of one block alone, without a fence of all memory, which is enough only if
// a product that was waited for no longer reads when a copy that is issued behind the arrival writes.  A GPU has to
// confirm that; `benchmarks/gpu.py products` begins with it.
__device__ __forceinline__ void arrive_at(u64 *mbarrier, u32 rank) {
#ifdef HOCKET_EMULATED
    emulation::arrive_at(mbarrier, rank);
#else
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}"
                 ::"r"(shared_address(mbarrier)), "r"(rank) : "memory");
#endif
}
// Arrive at this block's, whose phase is not over before so many bytes of copies are there as well.
__device__ __forceinline__ void arrive_before(u64 *mbarrier, u32 bytes) {
#ifdef HOCKET_EMULATED
    emulation::arrive_at(mbarrier, cluster_rank(), bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void wait_for_phase(u64 *mbarrier, u32 parity) {
#ifdef HOCKET_EMULATED
    emulation::wait_for_phase(mbarrier, parity);
#else
    asm volatile("{.reg .pred over; again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1; @!over bra again;}"
                 ::"r"(shared_address(mbarrier)), "r"(parity) : "memory");
#endif
}
// Whole pieces of 16 bytes from global memory to the same place of shared memory of all blocks in `mask`, a bit a rank; in
// each of them they arrive at the mbarrier in the same place.
__device__ __forceinline__ void copy_to_blocks(void *shared, const void *global, u32 bytes, u64 *mbarrier, u32 mask) {
#ifdef HOCKET_EMULATED
    emulation::copy_to_blocks(shared, global, bytes, mbarrier, mask);
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(mbarrier)), "h"((u16)mask) : "memory");
#endif
}
