// Arithmetic of integers, which wraps around; what is divided by 0 is 0.

__device__ __forceinline__ i64 quotient(i64 a, i64 b) { return b == -1 ? (i64)(0 - (u64)a) : a / b; }
__device__ __forceinline__ i64 rest(i64 a, i64 b) { return b == -1 ? 0 : a % b; }
__device__ __forceinline__ bool crosses(i64 a, i64 b) { return rest(a, b) != 0 && (a < 0) != (b < 0); }

// The order of `INTEGER_OPERATIONS` in ops/elementwise/integers.py.
enum Rule : i64 { ADD, SUB, MUL, FLOOR_DIV, TRUNC_DIV, FLOOR_MOD, TRUNC_MOD, MAX, MIN, AND, OR, XOR, LEFT, RIGHT };
__device__ __forceinline__ i64 calculated(i64 rule, i64 a, i64 b) {
    if (b == 0 && rule >= FLOOR_DIV && rule <= TRUNC_MOD) return 0;
    switch (rule) {
        case ADD: return (i64)((u64)a + (u64)b);
        case SUB: return (i64)((u64)a - (u64)b);
        case MUL: return (i64)((u64)a * (u64)b);
        case FLOOR_DIV: return quotient(a, b) - crosses(a, b);
        case TRUNC_DIV: return quotient(a, b);
        case FLOOR_MOD: return rest(a, b) + (crosses(a, b) ? b : 0);
        case TRUNC_MOD: return rest(a, b);
        case MAX: return a > b ? a : b;
        case MIN: return a < b ? a : b;
        case AND: return a & b;
        case OR: return a | b;
        case XOR: return a ^ b;
        case LEFT: return (u64)b < 64 ? (i64)((u64)a << b) : 0;
        default: return (u64)b < 64 ? a >> b : a < 0 ? -1 : 0;
    }
}
template <class A, class B> struct Calculate {
    i64 count, rule;
    Axes axes;
    Walk<const A> x;
    Walk<const B> y;
    Walk<A> out;
};
template <class A, class B> __global__ void calculate(const __grid_constant__ Calculate<A, B> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.y.step, a.out.step};
    each_element(
        a.count, a.axes, steps,
        [&](const Places<3> &p, u32) { return Pair<A, B>{a.x.at[p.at[0]], a.y.at[p.at[1]]}; },
        [&](const Places<3> &p, const Pair<A, B> &pair) { a.out.at[p.at[2]] = (A)calculated(a.rule, pair.x, pair.y); });
}
