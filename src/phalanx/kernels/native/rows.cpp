// Elementwise work of the CPU kernels in one pass over memory, compiled on the machine that runs it (kernels/native/build.py).
//
// Every function is the fused form of a few torch operations that stand beside it in kernels/*.py, and is tested against them. Storage is
// bf16, fp32 or fp64 (T); arithmetic and accumulation is fp32, in fp64 for fp64 (A). Rows are contiguous, `ld` elements apart.
//
// Must never change: no static state, no allocation, no threads (a lane calls with its own rows); NaN in, NaN out.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The rows of a loop do not overlap.
#define NO_ALIAS _Pragma("GCC ivdep")

namespace {

using extent = std::int64_t;

struct bf16 {
    std::uint16_t bits;
};

template <class T> using wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline float load(bf16 x) {
    const std::uint32_t bits = std::uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline float load(float x) { return x; }
inline double load(double x) { return x; }

// Round to nearest, ties to even; a NaN stays one.
inline void store(bf16& out, float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = std::uint16_t(x != x ? 0x7fc0u : rounded);
}
inline void store(float& out, float x) { out = x; }
inline void store(double& out, double x) { out = x; }

// Keeps a sum as it is written: sums may be reordered here (`build.py`), and without fused products GCC joins the two parts of log 2 below into one
// (e^x was 34 units in the last place off on a processor without FMA).
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
#define AS_WRITTEN(x) __builtin_assoc_barrier(x)
#elif __has_builtin(__arithmetic_fence)
#define AS_WRITTEN(x) __arithmetic_fence(x)
#endif
#endif
#ifndef AS_WRITTEN
#define AS_WRITTEN(x) (x)
#endif

// e^x without a branch, so that loops over it are vectorised; error below 1.5 units in the last place; 0 below the smallest normal number,
// infinite from 88.02 on.
inline float exponential(float x) {
    const float top = 88.02f, bottom = -87.33f;
    float y = x > top ? top : x;
    y = y < bottom ? bottom : y;
    const float n = __builtin_rintf(y * 1.44269504088896341f);
    float r = AS_WRITTEN(y - n * 0.693145751953125f);
    r = r - n * 1.428606765330187e-6f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const float whole = n > -127.0f ? n : -127.0f;  // a NaN has no integer; p still is one
    const std::int32_t power = (std::int32_t(whole) + 127) << 23;
    float by;
    std::memcpy(&by, &power, 4);
    const float big = x > top ? INFINITY : p * by;
    return x < bottom ? 0.0f : big;
}
inline double exponential(double x) { return std::exp(x); }

template <class A> inline A sigmoid(A x) { return A(1) / (A(1) + exponential(-x)); }

// h = silu(gate) * up
template <class T>
void swiglu_forward(const T* gate_up, extent gate_up_ld, T* h, extent h_ld, extent rows, extent width) {
    using A = wide<T>;
    for (extent r = 0; r < rows; ++r) {
        const T* gate = gate_up + r * gate_up_ld;
        const T* up = gate + width;
        T* out = h + r * h_ld;
        NO_ALIAS
        for (extent i = 0; i < width; ++i) {
            const A g = load(gate[i]);
            store(out[i], g * sigmoid(g) * A(load(up[i])));
        }
    }
}

// h again, the gradient of gate and up, and (dots not null) the product of each row of dh with its row of h
template <class T>
void swiglu_backward(const T* gate_up, extent gate_up_ld, const T* dh, extent dh_ld, T* h, extent h_ld, T* d_gate_up, extent d_ld,
                     wide<T>* dots, extent rows, extent width) {
    using A = wide<T>;
    for (extent r = 0; r < rows; ++r) {
        const T* gate = gate_up + r * gate_up_ld;
        const T* up = gate + width;
        const T* dh_row = dh + r * dh_ld;
        T* out = h + r * h_ld;
        T* d_gate = d_gate_up + r * d_ld;
        T* d_up = d_gate + width;
        A dot = 0;
        NO_ALIAS
        for (extent i = 0; i < width; ++i) {
            const A g = load(gate[i]), u = load(up[i]), d = load(dh_row[i]);
            const A s = sigmoid(g), silu = g * s;
            store(out[i], silu * u);
            store(d_up[i], d * silu);
            store(d_gate[i], d * u * (s + silu * (A(1) - s)));
            dot += d * silu * u;
        }
        if (dots) dots[r] = dot;
    }
}

// stream = x + delta (x where delta is null), out = stream * scale * weight with scale = 1 / sqrt(mean(stream^2) + eps)
template <class T>
void norm_forward(const T* x, const T* delta, T* stream, const wide<T>* weight, double eps, wide<T>* scale, T* out, extent rows, extent width) {
    using A = wide<T>;
    for (extent r = 0; r < rows; ++r, x += width, out += width) {
        const T* row = x;
        if (delta) {
            NO_ALIAS
            for (extent i = 0; i < width; ++i) store(stream[i], A(load(x[i])) + A(load(delta[i])));
            row = stream;
            delta += width;
            stream += width;
        }
        A squares = 0;
        for (extent i = 0; i < width; ++i) squares += A(load(row[i])) * A(load(row[i]));
        const A by = A(1) / std::sqrt(squares / A(width) + A(eps));
        scale[r] = by;
        NO_ALIAS
        for (extent i = 0; i < width; ++i) store(out[i], A(load(row[i])) * by * weight[i]);
    }
}

// The gradient of `x` (the stream) from those of the norm and, where not null, of the stream itself; adds to that of the weight.
template <class T>
void norm_backward(const T* x, const wide<T>* scale, const wide<T>* weight, const T* dy, const T* d_stream, T* dx, wide<T>* d_weight,
                   extent rows, extent width) {
    using A = wide<T>;
    for (extent r = 0; r < rows; ++r, x += width, dy += width, dx += width) {
        const A by = scale[r];
        A mean = 0;
        NO_ALIAS
        for (extent i = 0; i < width; ++i) {
            const A product = A(load(x[i])) * A(load(dy[i]));
            mean += product * weight[i];
            d_weight[i] += product * by;
        }
        const A factor = mean / A(width) * by * by;
        if (d_stream) {
            NO_ALIAS
            for (extent i = 0; i < width; ++i)
                store(dx[i], (A(load(dy[i])) * weight[i] - A(load(x[i])) * factor) * by + A(load(d_stream[i])));
            d_stream += width;
        } else {
            NO_ALIAS
            for (extent i = 0; i < width; ++i) store(dx[i], (A(load(dy[i])) * weight[i] - A(load(x[i])) * factor) * by);
        }
    }
}

// Each head of each token turned by the token's angles, in the "rotate half" convention; sign -1 turns back.
template <class T>
void rope(const T* x, const wide<T>* cosine, const wide<T>* sine, double sign, T* out, extent tokens, extent heads, extent pairs) {
    using A = wide<T>;
    const A direction = A(sign);
    for (extent t = 0; t < tokens; ++t, cosine += pairs, sine += pairs) {
        for (extent h = 0; h < heads; ++h, x += 2 * pairs, out += 2 * pairs) {
            NO_ALIAS
            for (extent i = 0; i < pairs; ++i) {
                const A a = load(x[i]), b = load(x[i + pairs]), s = sine[i] * direction;
                store(out[i], a * cosine[i] - b * s);
                store(out[i + pairs], b * cosine[i] + a * s);
            }
        }
    }
}

// Elements that stay in the first-level cache between two passes.
constexpr extent BLOCK = 2048;

// What `torch.optim.AdamW` does to each element (arXiv 1711.05101), from `scale * grad`; out, where not null, is the rounded master.
template <class G, class O>
void adamw(wide<O>* master, const G* grad, wide<O>* average, wide<O>* square, O* out, extent size, double scale, double lr, double beta1,
           double beta2, double eps, double decay, double correction1, double correction2) {
    using A = wide<O>;
    const A by = A(scale), keep = A(1 - lr * decay), rate = A(lr / correction1), root = A(1 / std::sqrt(correction2)), small = A(eps);
    const A b1 = A(beta1), b2 = A(beta2), c1 = A(1 - beta1), c2 = A(1 - beta2);
    for (extent start = 0; start < size; start += BLOCK) {
        const extent stop = start + BLOCK < size ? start + BLOCK : size;
        NO_ALIAS
        for (extent i = start; i < stop; ++i) {
            const A g = A(load(grad[i])) * by;
            const A m = average[i] * b1 + g * c1, v = square[i] * b2 + g * g * c2;
            average[i] = m;
            square[i] = v;
            master[i] = master[i] * keep - rate * m / (std::sqrt(v) * root + small);
        }
        if (!out) continue;
        NO_ALIAS
        for (extent i = start; i < stop; ++i) store(out[i], master[i]);
    }
}

// Sum of squares in fp64, where those of bf16 and fp32 numbers are exact.
template <class T> double square_sum(const T* x, extent size) {
    double total = 0;
    for (extent i = 0; i < size; ++i) total += double(load(x[i])) * double(load(x[i]));
    return total;
}

// In sixteen parts: the compiler may not reorder comparisons by itself, because of NaN.
template <class T> wide<T> largest(const T* x, extent size) {
    using A = wide<T>;
    constexpr extent parts = 16;
    const extent each = size / parts;
    A top = load(x[0]);
    A tops[parts];
    for (extent j = 0; j < parts; ++j) tops[j] = top;
    for (extent i = 0; i < each; ++i, x += parts) {
        A values[parts];
        for (extent j = 0; j < parts; ++j) values[j] = load(x[j]);
        for (extent j = 0; j < parts; ++j) tops[j] = values[j] > tops[j] ? values[j] : tops[j];
    }
    for (extent j = 0; j < parts; ++j) top = tops[j] > top ? tops[j] : top;
    for (extent j = 0; j < size - each * parts; ++j) top = A(load(x[j])) > top ? A(load(x[j])) : top;
    return top;
}

// Cross-entropy of each row of logits with its label (negative: none); with `gradient` the logits become their gradient.
template <class T>
void cross_entropy(T* logits, extent ld, const std::int64_t* labels, wide<T>* losses, wide<T>* scratch, extent rows, extent width, bool gradient) {
    using A = wide<T>;
    for (extent r = 0; r < rows; ++r) {
        T* z = logits + r * ld;
        const extent label = labels[r];
        const A valid = label < 0 ? A(0) : A(1);
        const A top = largest(z, width);
        A sum = 0;
        NO_ALIAS
        for (extent i = 0; i < width; ++i) {
            scratch[i] = exponential(A(load(z[i])) - top);
            sum += scratch[i];
        }
        const A of_label = label < 0 ? A(0) : A(load(z[label])) - top;
        losses[r] = valid * (std::log(sum) - of_label);
        if (!gradient) continue;
        const A by = valid / sum;
        NO_ALIAS
        for (extent i = 0; i < width; ++i) store(z[i], scratch[i] * by);
        if (label >= 0) store(z[label], exponential(of_label) / sum - A(1));
    }
}

// out[t] = sum over k of y[places[k, t]], nothing for a negative place
template <class T>
void sum_rows(const T* y, const std::int64_t* places, extent places_ld, T* out, wide<T>* scratch, extent copies, extent tokens, extent width) {
    using A = wide<T>;
    for (extent t = 0; t < tokens; ++t, out += width) {
        for (extent i = 0; i < width; ++i) scratch[i] = 0;
        for (extent k = 0; k < copies; ++k) {
            const extent place = places[k * places_ld + t];
            if (place < 0) continue;
            const T* row = y + place * width;
            NO_ALIAS
            for (extent i = 0; i < width; ++i) scratch[i] += A(load(row[i]));
        }
        NO_ALIAS
        for (extent i = 0; i < width; ++i) store(out[i], scratch[i]);
    }
}

// The magnitude of a number as an integer: in the same order, and not finite from that of infinity on.
inline std::int32_t magnitude(float x) {
    std::int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x7fffffff;
}
inline std::int64_t magnitude(double x) {
    std::int64_t bits;
    std::memcpy(&bits, &x, 8);
    return bits & 0x7fffffffffffffff;
}

// total += round(scale * x), ties to even; the largest magnitude, infinite where an element is not finite. What does not fit is garbage: the
// caller sees it by the magnitude.
template <class T> double fixed_add(const T* x, std::int64_t* total, extent size, double scale) {
    using A = wide<T>;
    decltype(magnitude(A(0))) top = 0;
    for (extent start = 0; start < size; start += BLOCK) {
        const extent stop = start + BLOCK < size ? start + BLOCK : size;
        for (extent i = start; i < stop; ++i) {
            const auto here = magnitude(A(load(x[i])));
            top = here > top ? here : top;
        }
        NO_ALIAS
        for (extent i = start; i < stop; ++i) total[i] += std::int64_t(__builtin_rint(double(load(x[i])) * scale));
    }
    if (top >= magnitude(A(INFINITY))) return INFINITY;
    A largest;
    std::memcpy(&largest, &top, sizeof largest);
    return double(largest);
}

// out = total * unit, a power of two
template <class T> void fixed_read(const std::int64_t* total, T* out, extent size, double unit) {
    NO_ALIAS
    for (extent i = 0; i < size; ++i) store(out[i], wide<T>(double(total[i]) * unit));
}

// The square of each scale * x, cut into whole units of 2^-20, of what is left of 2^-52, and of 2^-84: sums of integers, in any order the same.
// Within a block in doubles, which hold them exactly for squares below 2^22.
template <class T> void fixed_squares(const T* x, extent size, double scale, std::int64_t* sums) {
    sums[0] = sums[1] = sums[2] = 0;
    for (extent start = 0; start < size; start += BLOCK) {
        const extent stop = start + BLOCK < size ? start + BLOCK : size;
        double a = 0, b = 0, c = 0;
        for (extent i = start; i < stop; ++i) {
            const double v = double(load(x[i])) * scale, square = v * v;
            const double first = __builtin_rint(square * 0x1p20), left = square - first * 0x1p-20;
            const double second = __builtin_rint(left * 0x1p52), last = left - second * 0x1p-52;
            a += first;
            b += second;
            c += __builtin_rint(last * 0x1p84);
        }
        sums[0] += std::int64_t(a);
        sums[1] += std::int64_t(b);
        sums[2] += std::int64_t(c);
    }
}

}  // namespace

#define ROWS(T)                                                                                                                             \
    void swiglu_forward_##T(const T* gate_up, extent gate_up_ld, T* h, extent h_ld, extent rows, extent width) {                            \
        swiglu_forward<T>(gate_up, gate_up_ld, h, h_ld, rows, width);                                                                       \
    }                                                                                                                                       \
    void swiglu_backward_##T(const T* gate_up, extent gate_up_ld, const T* dh, extent dh_ld, T* h, extent h_ld, T* d, extent d_ld,          \
                             wide<T>* dots, extent rows, extent width) {                                                                    \
        swiglu_backward<T>(gate_up, gate_up_ld, dh, dh_ld, h, h_ld, d, d_ld, dots, rows, width);                                            \
    }                                                                                                                                       \
    void norm_forward_##T(const T* x, const T* delta, T* stream, const wide<T>* weight, double eps, wide<T>* scale, T* out, extent rows,    \
                          extent width) {                                                                                                   \
        norm_forward<T>(x, delta, stream, weight, eps, scale, out, rows, width);                                                            \
    }                                                                                                                                       \
    void norm_backward_##T(const T* x, const wide<T>* scale, const wide<T>* weight, const T* dy, const T* d_stream, T* dx,                  \
                           wide<T>* d_weight, extent rows, extent width) {                                                                  \
        norm_backward<T>(x, scale, weight, dy, d_stream, dx, d_weight, rows, width);                                                        \
    }                                                                                                                                       \
    void rope_##T(const T* x, const wide<T>* cosine, const wide<T>* sine, double sign, T* out, extent tokens, extent heads, extent pairs) { \
        rope<T>(x, cosine, sine, sign, out, tokens, heads, pairs);                                                                          \
    }                                                                                                                                       \
    double square_sum_##T(const T* x, extent size) { return square_sum<T>(x, size); }                                                       \
    void cross_entropy_##T(T* logits, extent ld, const std::int64_t* labels, wide<T>* losses, wide<T>* scratch, extent rows, extent width,  \
                           int gradient) {                                                                                                  \
        cross_entropy<T>(logits, ld, labels, losses, scratch, rows, width, gradient != 0);                                                  \
    }                                                                                                                                       \
    void sum_rows_##T(const T* y, const std::int64_t* places, extent places_ld, T* out, wide<T>* scratch, extent copies, extent tokens,     \
                      extent width) {                                                                                                       \
        sum_rows<T>(y, places, places_ld, out, scratch, copies, tokens, width);                                                             \
    }                                                                                                                                       \
    double fixed_add_##T(const T* x, std::int64_t* total, extent size, double scale) { return fixed_add<T>(x, total, size, scale); }        \
    void fixed_read_##T(const std::int64_t* total, T* out, extent size, double unit) { fixed_read<T>(total, out, size, unit); }             \
    void fixed_squares_##T(const T* x, extent size, double scale, std::int64_t* sums) { fixed_squares<T>(x, size, scale, sums); }

#define ADAMW(G, O)                                                                                                                         \
    void adamw_##G##_##O(wide<O>* master, const G* grad, wide<O>* average, wide<O>* square, O* out, extent size, double scale, double lr,   \
                         double beta1, double beta2, double eps, double decay, double correction1, double correction2) {                    \
        adamw<G, O>(master, grad, average, square, out, size, scale, lr, beta1, beta2, eps, decay, correction1, correction2);               \
    }

extern "C" {
ROWS(bf16)
ROWS(float)
ROWS(double)
ADAMW(bf16, bf16)
ADAMW(float, bf16)
ADAMW(float, float)
ADAMW(double, double)
}
