// Devices of a group meet in their own memory.
//
// Every device has words that the others write: one from each device, a ticket that says at which meeting it is.  A
// ticket only grows: the number of the run, then that of the meeting, then whether its results are there.  A device
// comes to a meeting by writing its ticket to all of them, and waits until all of theirs have come; so nothing has to be
// put back between meetings, nor after a run that failed.
//
// Order of memory: a ticket is written with release and read with acquire, both in the scope of the system, and a barrier
// of the block stands on either side.  What a device wrote before (in this kernel, or in one before it in its stream) is
// therefore seen by everybody who has met it, through peer addresses too; plain loads and stores do for all data.
//
// No wait is for ever: it ends when its time is over, or when somebody failed, which the board (memory of the host that
// all devices see) tells.  Then a fault is noted, and what follows in this run does nothing: peers' memory is left alone.

constexpr int MOST_DEVICES = 8, THREADS = 256;
constexpr int RUN = 0, STOPPED = 1, APART = 16, ARRIVED = 16, SENT = ARRIVED + APART * MOST_DEVICES;  // words of `signals`
constexpr int PUSHED = SENT + APART * MOST_DEVICES;  // two for each device
constexpr int BOARD_FAILED = 8;                    // a word of the board
constexpr u64 LATE_DEVICE = 16;  // what the board holds if device d came too late: this + d
enum { LATE, OUT_OF_STEP, OTHER_FAILED };
constexpr u32 SPINS = 1000;

// ------------------------------------------------------------------------------------------------- meetings

struct Group {
    u64 *signals[MOST_DEVICES], *board;
    i64 rank, devices, sequence, patience;  // patience in nanoseconds
    Fault fault;                            // the first of three
};

__device__ bool is_stopped(const u64 *mine) { return mine[STOPPED] == mine[RUN] + 1; }
__device__ u64 ticket(const Group &g, u64 has_results) {
    return g.signals[g.rank][RUN] << 32 | (u64)(g.sequence + 1) << 1 | has_results;
}
__device__ void stop(const Group &g, int why, i64 who) {
    note_fault({g.fault.found, g.fault.which + why}, who);
    u64 *mine = g.signals[g.rank];
    mine[STOPPED] = mine[RUN] + 1;
    if (load_acquire(&g.board[BOARD_FAILED]) == 0) store_release(&g.board[BOARD_FAILED], why == LATE ? LATE_DEVICE + who : 1);
}
// Until the word is at least the ticket; what it is then, or 0.
__device__ u64 wait_for(const Group &g, const u64 *word, u64 ticket, i64 who) {
    u64 since = 0;
    for (u32 spins = 0;; spins++) {
        const u64 found = load_acquire(word);
        if (found >= ticket) return found;
        if (spins < SPINS) continue;
        give_way();
        const u64 failed = load_acquire(&g.board[BOARD_FAILED]), now = nanoseconds();
        if (since == 0) since = now;
        if (failed >= LATE_DEVICE) return stop(g, LATE, failed - LATE_DEVICE), 0;
        if (failed) return stop(g, OTHER_FAILED, who), 0;
        if (now - since > (u64)g.patience) return stop(g, LATE, who), 0;
    }
}
// All threads of one block; whether everybody came.  `words` are those of this kind of meeting.
__device__ bool meet(const Group &g, u64 has_results, i64 words = ARRIVED) {
    const i64 peer = threadIdx.x;
    const u64 mine = ticket(g, has_results);
    __syncthreads();
    if (peer < g.devices) store_release(&g.signals[peer][words + APART * g.rank], mine);
    __syncthreads();  // threads need not take turns: all are told before anybody waits
    if (peer < g.devices) {
        const u64 theirs = wait_for(g, &g.signals[g.rank][words + APART * peer], mine, peer);
        // Nobody goes on to another meeting before all results are there.
        if (!has_results && theirs > (mine | 1)) stop(g, OUT_OF_STEP, peer);
    }
    __syncthreads();
    return !is_stopped(g.signals[g.rank]);
}

struct Begin {
    u64 *signals, *run;  // the number of this device's run, on the board
};
// Before the first meeting of a run.
__global__ void begin_run(const __grid_constant__ Begin a) {
    wait_for_earlier();
    a.signals[RUN] = load_acquire(a.run);
}

struct Mark {
    u64 *signals, *word;
    i64 sequence, has_results;
};
// For the host, which cannot see how far a stream has come.
__global__ void mark(const __grid_constant__ Mark a) {
    wait_for_earlier();
    store_release(a.word, a.signals[RUN] << 32 | (u64)(a.sequence + 1) << 1 | (u64)a.has_results);
}

struct Meet {
    Group group;
    i64 has_results;
};
__global__ void __launch_bounds__(32) meet_all(const __grid_constant__ Meet a) {
    wait_for_earlier();
    if (!is_stopped(a.group.signals[a.group.rank])) meet(a.group, a.has_results);
}

// One device sends, another receives; who sends goes on at once.
struct Pair {
    Group group;
    i64 other;
};
__global__ void tell_one(const __grid_constant__ Pair a) {
    wait_for_earlier();
    const Group &g = a.group;
    if (!is_stopped(g.signals[g.rank])) store_release(&g.signals[a.other][SENT + APART * g.rank], ticket(g, 0));
}
__global__ void await_one(const __grid_constant__ Pair a) {
    wait_for_earlier();
    const Group &g = a.group;
    if (is_stopped(g.signals[g.rank])) return;
    wait_for(g, &g.signals[g.rank][SENT + APART * a.other], ticket(g, 0), a.other);
}

// ----------------------------------------------------------------------------------------------------- sums

__device__ __forceinline__ float plus(float x, float y) { return x + y; }
template <class T> __device__ __forceinline__ T plus(T x, T y) { return (T)((u64)x + (u64)y); }
// What sums are taken in: of values that went over the wire in bfloat16, float32.
template <class T> __device__ __forceinline__ T widened(T x) { return x; }
__device__ __forceinline__ float widened(bf16_bits x) { return to_float(x); }
__device__ __forceinline__ void put(float &to, float x) { to = x; }
__device__ __forceinline__ void put(bf16_bits &to, float x) { to.bits = float_to_bf16(x); }
template <class T> __device__ __forceinline__ void put(T &to, T x) { to = x; }
template <class T> struct __align__(16) Pack {
    T at[16 / sizeof(T)];
};

template <class T> struct AllReduce {
    const T *source[MOST_DEVICES];
    T *target[MOST_DEVICES];
    i64 count;
    Group group;
};
// The device's part of all sums, for everybody: in order of the devices, so that the bits do not depend on who adds.
// A source may be a target: nobody else reads this part.
template <class T> __device__ void sum_part(const AllReduce<T> &a, i64 thread, i64 threads) {
    constexpr int N = 16 / sizeof(T);
    const i64 devices = a.group.devices, packs = (a.count + N - 1) / N;
    const i64 low = packs * a.group.rank / devices, high = packs * (a.group.rank + 1) / devices;
    for (i64 p = low + thread; p < high; p += threads) {
        if (p * N + N <= a.count) {
            Pack<T> pack = ((const Pack<T> *)a.source[0])[p];
            decltype(widened(pack.at[0])) total[N];
#pragma unroll
            for (int e = 0; e < N; e++) total[e] = widened(pack.at[e]);
            for (int d = 1; d < devices; d++) {
                const Pack<T> x = ((const Pack<T> *)a.source[d])[p];
#pragma unroll
                for (int e = 0; e < N; e++) total[e] = plus(total[e], widened(x.at[e]));
            }
#pragma unroll
            for (int e = 0; e < N; e++) put(pack.at[e], total[e]);
            for (int d = 0; d < devices; d++) ((Pack<T> *)a.target[d])[p] = pack;
        } else {
            for (i64 i = p * N; i < a.count; i++) {
                auto total = widened(a.source[0][i]);
                for (int d = 1; d < devices; d++) total = plus(total, widened(a.source[d][i]));
                for (int d = 0; d < devices; d++) put(a.target[d][i], total);
            }
        }
    }
}
// One meeting, for the fewest elements: everybody pushes what it has to everybody, and sums what came.  A device may be one
// sum ahead of who still reads, so sums take two halves of the inboxes and two words of the signals in turn.  It is never two
// ahead, as it meets all others in between.
template <class T> struct Pushed {
    const T *source;
    T *target, *inbox[MOST_DEVICES];  // this sum's half, of each device: a slot for each sender
    i64 count, slot, turn;            // a slot is whole packs of elements
    Group group;
};
template <class T> __global__ void __launch_bounds__(THREADS) all_reduce_pushed(const __grid_constant__ Pushed<T> a) {
    wait_for_earlier();
    constexpr int N = 16 / sizeof(T);
    const i64 devices = a.group.devices, rank = a.group.rank;
    if (is_stopped(a.group.signals[rank])) return;
    for (i64 first = threadIdx.x * N; first < a.count; first += THREADS * N) {
        Pack<T> pack = {};
        if (first + N <= a.count) pack = *(const Pack<T> *)(a.source + first);
        else
            for (int e = 0; first + e < a.count; e++) pack.at[e] = a.source[first + e];
        for (int d = 0; d < devices; d++) *(Pack<T> *)(a.inbox[d] + rank * a.slot + first) = pack;
    }
    if (!meet(a.group, 0, PUSHED + a.turn)) return;
    for (i64 first = threadIdx.x * N; first < a.count; first += THREADS * N) {
        Pack<T> total = *(const Pack<T> *)(a.inbox[rank] + first);
        for (int d = 1; d < devices; d++) {
            const Pack<T> x = *(const Pack<T> *)(a.inbox[rank] + d * a.slot + first);
#pragma unroll
            for (int e = 0; e < N; e++) total.at[e] = plus(total.at[e], x.at[e]);
        }
        if (first + N <= a.count) *(Pack<T> *)(a.target + first) = total;
        else
            for (int e = 0; first + e < a.count; e++) a.target[first + e] = total.at[e];
    }
}
// All in one block, for few elements.
template <class T> __global__ void __launch_bounds__(THREADS, 4) all_reduce(const __grid_constant__ AllReduce<T> a) {
    wait_for_earlier();
    if (is_stopped(a.group.signals[a.group.rank]) || !meet(a.group, 0)) return;
    sum_part(a, threadIdx.x, THREADS);
    meet(a.group, 1);
}
// Between two meetings, for many.
template <class T> __global__ void __launch_bounds__(THREADS, 4) sum_parts(const __grid_constant__ AllReduce<T> a) {
    wait_for_earlier();
    if (is_stopped(a.group.signals[a.group.rank])) return;
    sum_part(a, (i64)blockIdx.x * THREADS + threadIdx.x, (i64)gridDim.x * THREADS);
}

// The sum of pieces of several devices, as they lie; of one device: a copy.
template <class T> struct Pieces {
    i64 count, sources;
    Axes axes;
    Walk<T> out;
    Walk<const T> in[MOST_DEVICES];
    const u64 *mine;
};
template <class T> __global__ void __launch_bounds__(THREADS) take(const __grid_constant__ Pieces<T> a) {
    wait_for_earlier();
    if (is_stopped(a.mine)) return;
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.count) return;
    const i64 *const own[] = {a.out.step, a.in[0].step};
    const Places<2> p = places(a.axes, own, i);
    T total = a.in[0].at[p.at[1]];
    for (int d = 1; d < a.sources; d++) {
        const i64 *const step[] = {a.in[d].step};
        total = plus(total, a.in[d].at[places(a.axes, step, i).at[0]]);
    }
    a.out.at[p.at[0]] = total;
}

// ----------------------------------------------------------------------------------------------------- the wire

struct Narrow {
    const float *from;
    bf16_bits *to;
    i64 count;
};
__global__ void __launch_bounds__(THREADS) narrow(const __grid_constant__ Narrow a) {
    wait_for_earlier();
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i < a.count) put(a.to[i], a.from[i]);
}
struct Widen {
    const bf16_bits *from;
    float *to;
    i64 count;
    const u64 *mine;
};
__global__ void __launch_bounds__(THREADS) widen(const __grid_constant__ Widen a) {
    wait_for_earlier();
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i < a.count && !is_stopped(a.mine)) a.to[i] = to_float(a.from[i]);
}
