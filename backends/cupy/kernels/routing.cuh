// Which experts a token goes to, and what each of them counts: from the scores of a router to shares in one pass, by one
// warp for each token, of whose scores a lane has EACH.

enum Gating : i64 { SOFTMAX, SIGMOID };

struct Routing {
    const float *scores;
    i64 step, experts, used, gating, normalised;  // shares are divided by their sum, brought between `least` and `most`
    double scale, least, most, factor, shift;     // of scores; of that sum; of shares
    const float *bias;                            // [experts], for the choice alone; or null
    i32 *ids;                                     // dense [token, used], as shares are
    float *shares;
};
// By one warp for a token; `numbers` is shared and has room for 32 EACH scores.
template <int EACH> __device__ __forceinline__ void route_token(const Routing &a, i64 token, float *numbers) {
    const int lane = threadIdx.x % 32, experts = (int)a.experts, used = (int)a.used;
    const float *scores = a.scores + token * a.step;
    float x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = lane + 32 * i < experts ? scores[lane + 32 * i] * (float)a.scale : -INFINITY;
    if (a.gating == SOFTMAX) {
        float top = x[0], sum = 0.0f;
#pragma unroll
        for (int i = 1; i < EACH; i++) top = fmaxf(top, x[i]);
        top = warp_max(top);
        if (top == -INFINITY) top = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) sum += x[i] = expf(x[i] - top);
        sum = warp_sum(sum);
        const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] *= by;
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = logistic(x[i]);
    }
    u64 item[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int number = lane + 32 * i;
        numbers[number] = x[i];
        item[i] = number < experts ? item_of(a.bias ? x[i] + a.bias[number] : x[i], number, true) : LAST;
    }
    int own = 0;  // lane j gets the expert that comes j-th
    for (int j = 0; j < used; j++) {
        u64 first = item[0];
#pragma unroll
        for (int i = 1; i < EACH; i++) first = min(first, item[i]);
#pragma unroll
        for (int by = 16; by > 0; by >>= 1) first = min(first, __shfl_xor_sync(ALL_LANES, first, by));
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (item[i] == first) item[i] = LAST;
        if (lane == j) own = (int)(u32)first;
    }
    __syncwarp();
    float share = lane < used ? numbers[own] : 0.0f;
    if (a.normalised) {
        const float sum = warp_sum(share);
        share /= sum < (float)a.least ? (float)a.least : sum > (float)a.most ? (float)a.most : sum;
    }
    if (lane >= used) return;
    a.ids[token * used + lane] = own;
    a.shares[token * used + lane] = share * (float)a.factor + (float)a.shift;
}
