// Truth values, which are 0 and 1: comparisons, choices by them; entries of rows by number.

enum Relation : i64 { EQ, NE, LT, LE, GT, GE };
template <class T> __device__ __forceinline__ bool holds(i64 relation, T a, T b) {
    switch (relation) {
        case EQ: return a == b;
        case NE: return a != b;
        case LT: return a < b;
        case LE: return a <= b;
        case GT: return a > b;
        default: return a >= b;
    }
}
// A type that holds what both hold.
template <class A, class B> struct Common {
    using type = double;
};
template <class T> struct Common<T, T> {
    using type = T;
};
template <> struct Common<i32, i64> {
    using type = i64;
};
template <> struct Common<i64, i32> {
    using type = i64;
};
template <class A, class B> struct Compare {
    i64 count, relation;
    Axes axes;
    Walk<const A> x;
    Walk<const B> y;
    Walk<float> out;
};
template <class A, class B> __global__ void compare(const __grid_constant__ Compare<A, B> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.y.step, a.out.step};
    using T = typename Common<A, B>::type;
    each_element(
        a.count, a.axes, steps,
        [&](const Places<3> &p, u32) { return Pair<A, B>{a.x.at[p.at[0]], a.y.at[p.at[1]]}; },
        [&](const Places<3> &p, const Pair<A, B> &pair) { a.out.at[p.at[2]] = holds(a.relation, (T)pair.x, (T)pair.y) ? 1.0f : 0.0f; });
}

template <class T> struct Where {
    i64 count;
    Axes axes;
    Walk<const float> truth;
    Walk<const T> x, y;
    Walk<T> out;
};
// Both are read: to wait for the truth before would take twice as long.
template <class T> struct Choice {
    float truth;
    T x, y;
};
template <class T> __global__ void where(const __grid_constant__ Where<T> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.truth.step, a.x.step, a.y.step, a.out.step};
    each_element(
        a.count, a.axes, steps,
        [&](const Places<4> &p, u32) { return Choice<T>{a.truth.at[p.at[0]], a.x.at[p.at[1]], a.y.at[p.at[2]]}; },
        [&](const Places<4> &p, const Choice<T> &c) { a.out.at[p.at[3]] = c.truth != 0.0f ? c.x : c.y; });
}

// Entry `ids[i]` of a row of `size` entries becomes entry i.
template <class T, class Id> struct Taken {
    i64 count, size, step;
    Axes axes;
    Walk<const T> row;
    Walk<const Id> ids;
    Walk<T> out;
    Fault fault;
};
template <class T, class Id> __global__ void taken(const __grid_constant__ Taken<T, Id> a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const i64 *const steps[] = {a.row.step, a.ids.step, a.out.step};
    const Places<3> p = places(a.axes, steps, i);
    const i64 id = a.ids.at[p.at[1]];
    if (id < 0 || id >= a.size) return note_fault(a.fault, id);
    a.out.at[p.at[2]] = a.row.at[p.at[0] + id * a.step];
}
