// Windows that slide over up to three axes.

struct Along {
    i64 size, step, windows, taps, stride, dilation, left;  // of x, its step; of windows, their entries
};
template <class T> struct Windows {
    i64 count, channels, image_step, channel_step, value;
    Along axis[3];
    const T *x;
    T *out;
};
// Entry by entry of [images, windows, channels, taps]; bits of `value` stand for what lies outside.
template <class T> __global__ void windows(const __grid_constant__ Windows<T> a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    u32 taps = 1, all = 1;
#pragma unroll
    for (int d = 0; d < 3; d++) taps *= (u32)a.axis[d].taps, all *= (u32)a.axis[d].windows;
    u32 tap = i % taps, rest = i / taps;
    const u32 channel = rest % (u32)a.channels;
    rest /= (u32)a.channels;
    u32 window = rest % all;
    i64 from = (i64)(rest / all) * a.image_step + channel * a.channel_step;
    bool inside = true;
#pragma unroll
    for (int d = 2; d >= 0; d--) {
        const Along &axis = a.axis[d];
        const u32 w = window % (u32)axis.windows, t = tap % (u32)axis.taps;
        window /= (u32)axis.windows, tap /= (u32)axis.taps;
        const i64 at = w * axis.stride + t * axis.dilation - axis.left;
        inside = inside && at >= 0 && at < axis.size;
        from += at * axis.step;
    }
    a.out[i] = inside ? a.x[from] : (T)a.value;
}
