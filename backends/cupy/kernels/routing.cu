// One block for each token.
template <int EACH> __global__ void __launch_bounds__(32) route(const __grid_constant__ Routing a) {
    wait_for_earlier();
    SHARED(made, float[32 * EACH]);
    route_token<EACH>(a, blockIdx.x, made);
}
