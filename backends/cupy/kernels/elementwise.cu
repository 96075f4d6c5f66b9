// Element by element, over operands of any strides that are repeated or tiled to the shape of the result.

struct Numbers {
    double a, b, c, d;
};

// ------------------------------------------------------------------------------------------------ functions

__device__ __forceinline__ float gelu_erf(float x) { return 0.5f * x * erfcf(x * -0.70710678118654752f); }
__device__ __forceinline__ float gelu_quick(float x) { return x * logistic(1.702f * x); }
// NaN stays NaN, which fminf and fmaxf would drop.
__device__ __forceinline__ float clipped(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
// As IEEE 754 orders zeros: from a bound of +0 on no result has a sign, and up to -0 all have one.
__device__ __forceinline__ float clamped(float x, float low, float high) {
    const float y = clipped(x, low, high);
    return __float_as_uint(low) == 0 ? fabsf(y) : __float_as_uint(high) == 1u << 31 ? -fabsf(y) : y;
}
// Of two that are equal the bits decide, which differ for zeros only; NaN if one is.
__device__ __forceinline__ float larger(float x, float y) {
    return x == y ? __uint_as_float(__float_as_uint(x) & __float_as_uint(y)) : x > y || x != x ? x : y;
}
__device__ __forceinline__ float smaller(float x, float y) {
    return x == y ? __uint_as_float(__float_as_uint(x) | __float_as_uint(y)) : x < y || x != x ? x : y;
}
__device__ __forceinline__ float hardsigmoid(float x) { return clipped((x + 3.0f) / 6.0f, 0.0f, 1.0f); }

__device__ __forceinline__ float clamped_gate(float x, float alpha, float limit) {
    const float gate = x > limit ? limit : x;
    return gate * logistic(alpha * gate);
}

// expm1(y) - x for y <= 0, most often x itself.  Up to y = -1 a polynomial is y * y times what is within 2.4e-10 of
// (expm1(y) - y) / (y * y): there the difference of the two has lost the bits that expm1f rounds.
__device__ __forceinline__ float bend(float x, float y) {
    if (y < -1.0f) return expm1f(y) - x;
    const float low = 8.33105026e-3f + y * (1.38224157e-3f + y * (1.88324755e-4f + y * 1.69281272e-5f));
    return y * y * (0.5f + y * (0.166666643f + y * (0.0416662902f + y * low))) + (y - x);
}

// Each under the name of its op; of a gated unit x is the gate, and y is multiplied by it.
namespace function {
#define UNARY(name, result)                                                      \
    struct name {                                                                \
        static __device__ __forceinline__ float of(float x, const Numbers &n) { \
            return result;                                                       \
        }                                                                        \
    };
UNARY(neg, -x)
UNARY(abs, fabsf(x))
UNARY(sgn, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : fabsf(x))
UNARY(step, x > 0.0f ? 1.0f : 0.0f)
UNARY(sqr, x * x)
UNARY(sqrt, sqrtf(x))
UNARY(log, logf(x))
UNARY(log1p, log1pf(x))
UNARY(exp, expf(x))
UNARY(expm1, expm1f(x))
UNARY(erf, erff(x))
UNARY(sin, sinf(x))
UNARY(cos, cosf(x))
UNARY(tan, tanf(x))
UNARY(arcsin, asinf(x))
UNARY(arccos, acosf(x))
UNARY(arctan, atanf(x))
UNARY(sinh, sinhf(x))
UNARY(cosh, coshf(x))
UNARY(tanh, tanhf(x))
UNARY(arcsinh, asinhf(x))
UNARY(arccosh, acoshf(x))
UNARY(arctanh, atanhf(x))
UNARY(floor, floorf(x))
UNARY(ceil, ceilf(x))
UNARY(round, roundf(x))
UNARY(trunc, truncf(x))
UNARY(sigmoid, logistic(x))
UNARY(silu, ::silu(x))
UNARY(softplus, fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))))
UNARY(relu, x <= 0.0f ? 0.0f : x)
UNARY(leaky_relu, x > 0.0f ? x : (float)n.a * x)
UNARY(elu, x > 0.0f ? x : expm1f(x))
UNARY(xielu, (x > 0.0f ? (float)n.b * x * x : (float)n.a * bend(x, fminf(x, (float)n.d))) + (float)n.c * x)
UNARY(gelu, ::gelu(x))
UNARY(gelu_erf, ::gelu_erf(x))
UNARY(gelu_quick, ::gelu_quick(x))
UNARY(hardsigmoid, ::hardsigmoid(x))
UNARY(hardswish, x * ::hardsigmoid(x))
UNARY(scale, x * (float)n.a + (float)n.b)
UNARY(clamp, clamped(x, (float)n.a, (float)n.b))
UNARY(fill, (float)n.a)

#define BINARY(name, result)                                                               \
    struct name {                                                                          \
        static __device__ __forceinline__ float of(float x, float y, const Numbers &n) { \
            return result;                                                                 \
        }                                                                                  \
    };
BINARY(add, x + y)
BINARY(sub, x - y)
BINARY(mul, x * y)
BINARY(div, x / y)
BINARY(maximum, larger(x, y))
BINARY(minimum, smaller(x, y))
BINARY(power, powf(x, y))
BINARY(mul_sigmoid, x * logistic(y))
BINARY(reglu, (x <= 0.0f ? 0.0f : x) * y)
BINARY(geglu, ::gelu(x) * y)
BINARY(geglu_erf, ::gelu_erf(x) * y)
BINARY(geglu_quick, ::gelu_quick(x) * y)
BINARY(swiglu, ::silu(x) * y)
BINARY(swiglu_oai, clamped_gate(x, (float)n.a, (float)n.b) * (clipped(y, -(float)n.b, (float)n.b) + 1.0f))
BINARY(swiglu_clamp, clamped_gate(x, 1.0f, (float)n.b) * clipped(y, -(float)n.b, (float)n.b))
}  // namespace function

// -------------------------------------------------------------------------------------------------- kernels

struct Unary {
    i64 count;
    Axes axes;
    Walk<const float> x;
    Walk<float> out;
    Numbers numbers;
};
template <class F> __global__ void unary(const __grid_constant__ Unary a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.out.step};
    each_element(
        a.count, a.axes, steps,
        [&](const Places<2> &p, u32) { return a.x.at[p.at[0]]; },
        [&](const Places<2> &p, float x) { a.out.at[p.at[1]] = F::of(x, a.numbers); });
}

struct Binary {
    i64 count;
    Axes axes;
    Walk<const float> x, y;
    Walk<float> out;
    Numbers numbers;
};
template <class F> __global__ void binary(const __grid_constant__ Binary a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.y.step, a.out.step};
    each_element(
        a.count, a.axes, steps,
        [&](const Places<3> &p, u32) { return make_float2(a.x.at[p.at[0]], a.y.at[p.at[1]]); },
        [&](const Places<3> &p, float2 pair) { a.out.at[p.at[2]] = F::of(pair.x, pair.y, a.numbers); });
}

// Any operand as another type: weights that are kept in 16 bits, and integers.
template <class To> struct Convert {
    template <class From> static __device__ __forceinline__ To of(From x, i64) { return (To)x; }
    static __device__ __forceinline__ To of(half_bits x, i64) { return (To)to_float(x); }
    static __device__ __forceinline__ To of(bf16_bits x, i64) { return (To)to_float(x); }
};
template <class Cell> struct ToCell {
    static __device__ __forceinline__ Cell of(float x, i64) {
        Cell cell;
        put_cell(&cell, x);
        return cell;
    }
};
template <> struct Convert<half_bits> : ToCell<half_bits> {};
template <> struct Convert<bf16_bits> : ToCell<bf16_bits> {};
// A float is rounded to what half (1) or bfloat16 (2) can hold.
template <> struct Convert<float> {
    template <class From> static __device__ __forceinline__ float of(From from, i64 rounding) {
        const float x = to_float(from);
        if (rounding == 1) return half_to_float(float_to_half(x));
        return rounding == 2 ? bf16_to_float(float_to_bf16(x)) : x;
    }
};
template <class From, class To> struct Cast {
    i64 count, rounding;
    Axes axes;
    Walk<const From> x;
    Walk<To> out;
};
template <class From, class To> __global__ void cast(const __grid_constant__ Cast<From, To> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.out.step};
    each_element(
        a.count, a.axes, steps,
        [&](const Places<2> &p, u32) { return ((CellReader<From>)a.x.at)[p.at[0]]; },
        [&](const Places<2> &p, auto x) { a.out.at[p.at[1]] = Convert<To>::of(x, a.rounding); });
}
