// Elementwise work of the CPU kernels in one pass over memory, compiled on the machine that runs it (kernels/native/build.py).
//
// Every function is the fused form of a few torch operations that stand beside it in kernels/*.py, and is tested against them. Storage is
// bf16, fp32 or fp64 (T); arithmetic and accumulation is fp32, in fp64 for fp64 (A). Rows are contiguous, `ld` elements apart.
//
// Must never change: no static state, no allocation, no threads (a lane calls with its own rows); NaN in, NaN out, except in what is left out.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The rows of a loop do not overlap.
#define NO_ALIAS _Pragma("GCC ivdep")
// Nor do they here, and these sums may be taken in any order. All other arithmetic is done as it is written.
#define PRAGMA(words) _Pragma(#words)
#define SUM_OF(...) PRAGMA(omp simd reduction(+ : __VA_ARGS__))

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

// a * b + c, rounded once where the processor does that in one instruction. Of two products in a sum the compiler may fuse either, and GCC 15 and 16 choose otherwise
// in the last few elements of a loop than in the whole vectors before them: where bits may not depend on who has which elements, this says it.
template <class A> inline A fused(A a, A b, A c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    if constexpr (std::is_same_v<A, float>) return __builtin_fmaf(a, b, c);
    else return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

// e^x without a branch, so that loops over it are vectorised; error below 1.2 units in the last place; 0 below the smallest normal number,
// infinite from 88.02 on.
inline float exponential(float x) {
    const float top = 88.02f, bottom = -87.33f;
    float y = x > top ? top : x;
    y = y < bottom ? bottom : y;
    const float n = __builtin_rintf(y * 1.44269504088896341f);
    float r = y - n * 0.693145751953125f;
    r = r - n * 1.428606765330187e-6f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r + 1.0f) * r + 1.0f;
    const float whole = n > -127.0f ? n : -127.0f;  // a NaN has no integer; p still is one
    const std::int32_t power = (std::int32_t(whole) + 127) << 23;
    float by;
    std::memcpy(&by, &power, 4);
    const float big = x > top ? INFINITY : p * by;
    return x < bottom ? 0.0f : big;
}
inline double exponential(double x) { return std::exp(x); }

template <class A> inline A sigmoid(A x) { return A(1) / (A(1) + exponential(-x)); }

// What one look at the rows of a matrix finds: its largest magnitude, and the mean square of every eighth row but for the largest. In functions that read the rows anyway it costs little.
inline std::int16_t bits_of(bf16 x) { return std::int16_t(x.bits & 0x7fffu); }
inline std::int32_t bits_of(float x) {
    std::int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x7fffffff;
}
inline std::int64_t bits_of(double x) {
    std::int64_t bits;
    std::memcpy(&bits, &x, 8);
    return bits & 0x7fffffffffffffff;
}
template <class T> struct Look {
    using Bits = decltype(bits_of(T{}));
    static constexpr extent lanes = 256 / extent(sizeof(T)), sums = 32;  // several registers each, brought together once, at the end
    Bits tops[lanes] = {};  // magnitudes as integers have the order of the numbers; those that are not finite come last
    wide<T> squares[sums] = {};
    extent rows = 0, counted = 0;

    void row(const T* x, extent width) {
        add_tops(x, width);
        if (rows++ % 8 == 0) add_squares(x, width, 1, width);
    }
    // Rows that follow one another in memory.
    void dense(const T* x, extent count, extent width) {
        add_tops(x, count * width);
        add_squares(x, 8 * width, (count + 7) / 8, width);
    }
    void add_tops(const T* x, extent size) {
        Bits here[lanes];
        std::memcpy(here, tops, sizeof here);
        extent i = 0;
        for (; i + lanes <= size; i += lanes)
            for (extent j = 0; j < lanes; ++j) here[j] = bits_of(x[i + j]) > here[j] ? bits_of(x[i + j]) : here[j];
        for (extent j = 0; i + j < size; ++j) here[j] = bits_of(x[i + j]) > here[j] ? bits_of(x[i + j]) : here[j];
        std::memcpy(tops, here, sizeof here);
    }
    void add_squares(const T* x, extent ld, extent count, extent width) {
        wide<T> here[sums];
        std::memcpy(here, squares, sizeof here);
        for (extent r = 0; r < count; ++r, x += ld) {
            extent i = 0;
            for (; i + sums <= width; i += sums)
                for (extent j = 0; j < sums; ++j) here[j] += wide<T>(load(x[i + j])) * wide<T>(load(x[i + j]));
            for (extent j = 0; i + j < width; ++j) here[j] += wide<T>(load(x[i + j])) * wide<T>(load(x[i + j]));
        }
        std::memcpy(squares, here, sizeof here);
        counted += count * width;
    }
    double largest() const {
        Bits top = 0;
        for (extent j = 0; j < lanes; ++j) top = tops[j] > top ? tops[j] : top;
        T found;
        std::memcpy(&found, &top, sizeof found);
        return double(load(found));
    }
    void tell(double* seen) const {
        seen[0] = largest();
        double others = -seen[0] * seen[0];  // or one element out of few would hide behind itself
        for (extent j = 0; j < sums; ++j) others += double(squares[j]);
        seen[1] = others > 0 && others <= 1e300 ? others / double(counted) : 0;
    }
};

template <class T> void look(const T* x, extent ld, extent rows, extent width, double* seen) {
    Look<T> found;
    if (ld == width)
        found.dense(x, rows, width);
    else
        for (extent r = 0; r < rows; ++r) found.row(x + r * ld, width);
    found.tell(seen);
}

// The mean square of what stands in one row with the largest element, which a look has found: zero where that row has nothing else.
template <class T> double beside(const T* x, extent ld, extent rows, extent width, double largest) {
    for (extent r = 0; r < rows; ++r, x += ld) {
        Look<T> found;
        found.row(x, width);
        if (found.largest() != largest) continue;
        double seen[2];
        found.tell(seen);
        return seen[1];
    }
    return 0;
}

// h = silu(gate) * up; `seen` (2), where not null: a look at gate_up
template <class T>
void swiglu_forward(const T* gate_up, extent gate_up_ld, T* h, extent h_ld, extent rows, extent width, double* seen) {
    using A = wide<T>;
    Look<T> found;
    for (extent r = 0; r < rows; ++r) {
        const T* gate = gate_up + r * gate_up_ld;
        if (seen) found.row(gate, 2 * width);
        const T* up = gate + width;
        T* out = h + r * h_ld;
        NO_ALIAS
        for (extent i = 0; i < width; ++i) {
            const A g = load(gate[i]);
            store(out[i], g / (A(1) + exponential(-g)) * A(load(up[i])));
        }
    }
    if (seen) found.tell(seen);
}

// h again, the gradient of gate and up, and (dots not null) the product of each row of dh with its row of h; `seen` (2), where not null: a look at dh
template <class T>
void swiglu_backward(const T* gate_up, extent gate_up_ld, const T* dh, extent dh_ld, T* h, extent h_ld, T* d_gate_up, extent d_ld,
                     wide<T>* dots, extent rows, extent width, double* seen) {
    using A = wide<T>;
    Look<T> found;
    for (extent r = 0; r < rows; ++r) {
        const T* gate = gate_up + r * gate_up_ld;
        const T* up = gate + width;
        const T* dh_row = dh + r * dh_ld;
        if (seen) found.row(dh_row, width);
        T* out = h + r * h_ld;
        T* d_gate = d_gate_up + r * d_ld;
        T* d_up = d_gate + width;
        A dot = 0;
        SUM_OF(dot)
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
    if (seen) found.tell(seen);
}

// out = by * x, by rows (x where by is null); `seen` (2), where not null: a look at x
template <class T>
void scale_rows(const T* x, extent x_ld, const T* by, extent by_ld, T* out, extent out_ld, extent rows, extent width, double* seen) {
    using A = wide<T>;
    Look<T> found;
    for (extent r = 0; r < rows; ++r, x += x_ld, out += out_ld) {
        if (seen) found.row(x, width);
        if (by) {
            const A b = load(by[r * by_ld]);
            NO_ALIAS
            for (extent i = 0; i < width; ++i) store(out[i], A(load(x[i])) * b);
        } else {
            std::memcpy(out, x, std::size_t(width) * sizeof(T));
        }
    }
    if (seen) found.tell(seen);
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
        SUM_OF(squares)
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
        SUM_OF(mean)
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

// Sum of the 32-bit words of memory, modulo 2^32: one flipped bit changes it, whichever it is. The first byte is byte number `phase` of its word; bytes that are
// missing at the ends count as zeros.
inline std::uint32_t word_sum(const void* memory, extent bytes, extent phase = 0) {
    const auto* at = static_cast<const unsigned char*>(memory);
    std::uint32_t sum = 0;
    if (phase && bytes) {
        const extent first = 4 - phase < bytes ? 4 - phase : bytes;
        std::memcpy(reinterpret_cast<unsigned char*>(&sum) + phase, at, std::size_t(first));
        at += first;
        bytes -= first;
    }
    for (extent i = 0; i < bytes / 4; ++i) {
        std::uint32_t word;
        std::memcpy(&word, at + 4 * i, 4);
        sum += word;
    }
    if (bytes % 4) {
        std::uint32_t word = 0;
        std::memcpy(&word, at + bytes / 4 * 4, std::size_t(bytes % 4));
        sum += word;
    }
    return sum;
}
inline std::uint32_t words_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline std::uint32_t words_of(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, 8);
    return std::uint32_t(bits) + std::uint32_t(bits >> 32);
}

// What `torch.optim.AdamW` does to each element (arXiv 1711.05101), from `scale * grad`; out, where not null, is the rounded master. `sums` (7), where not null: the
// word sums of master and both moments as they were and as they are now, and of out, are added to it. They are taken in any case, from the registers that hold the
// numbers: two forms of the loop could round otherwise.
template <class G, class O>
void adamw(wide<O>* master, const G* grad, wide<O>* average, wide<O>* square, O* out, extent size, double scale, double lr, double beta1,
           double beta2, double eps, double decay, double correction1, double correction2, std::uint32_t* sums) {
    using A = wide<O>;
    const A by = A(scale), keep = A(1 - lr * decay), rate = A(lr / correction1), root = A(1 / std::sqrt(correction2)), small = A(eps);
    const A b1 = A(beta1), b2 = A(beta2), c1 = A(1 - beta1), c2 = A(1 - beta2);
    std::uint32_t was[3] = {}, is[3] = {};
    const extent phase = extent(reinterpret_cast<std::uintptr_t>(out) % 4);
    for (extent start = 0; start < size; start += BLOCK) {
        const extent stop = start + BLOCK < size ? start + BLOCK : size;
        NO_ALIAS
        for (extent i = start; i < stop; ++i) {
            const A g = A(load(grad[i])) * by, w = master[i], before_m = average[i], before_v = square[i];
            const A m = fused<A>(before_m, b1, g * c1), v = fused<A>(before_v, b2, g * g * c2);
            const A now = fused<A>(w, keep, -(rate * m / fused<A>(std::sqrt(v), root, small)));
            average[i] = m;
            square[i] = v;
            master[i] = now;
            was[0] += words_of(w), was[1] += words_of(before_m), was[2] += words_of(before_v);
            is[0] += words_of(now), is[1] += words_of(m), is[2] += words_of(v);
        }
        if (!out) continue;
        NO_ALIAS
        for (extent i = start; i < stop; ++i) store(out[i], master[i]);
        if (sums) sums[6] += word_sum(out + start, (stop - start) * extent(sizeof(O)), phase);
    }
    for (int s = 0; sums && s < 3; ++s) sums[s] += was[s], sums[3 + s] += is[s];
}

// Sums of the columns of x (rows, width) and of their magnitudes, each row times `by` and `by_size` (null: one).
template <class T, class A>
void column_sums(const T* x, extent ld, extent rows, extent width, const A* by, const A* by_size, A* sums, A* sizes) {
    for (extent i = 0; i < width; ++i) sums[i] = sizes[i] = 0;
    constexpr extent together = 4;  // rows for one reading and writing of the sums
    extent r = 0;
    for (; r + together <= rows; r += together, x += together * ld) {
        const T *x0 = x, *x1 = x + ld, *x2 = x + 2 * ld, *x3 = x + 3 * ld;
        if (by) {
            const A *b = by + r, *z = by_size + r;
            NO_ALIAS
            for (extent i = 0; i < width; ++i) {
                const A v0 = load(x0[i]), v1 = load(x1[i]), v2 = load(x2[i]), v3 = load(x3[i]);
                sums[i] += (v0 * b[0] + v1 * b[1]) + (v2 * b[2] + v3 * b[3]);
                sizes[i] += (std::fabs(v0) * z[0] + std::fabs(v1) * z[1]) + (std::fabs(v2) * z[2] + std::fabs(v3) * z[3]);
            }
        } else {
            NO_ALIAS
            for (extent i = 0; i < width; ++i) {
                const A v0 = load(x0[i]), v1 = load(x1[i]), v2 = load(x2[i]), v3 = load(x3[i]);
                sums[i] += (v0 + v1) + (v2 + v3);
                sizes[i] += (std::fabs(v0) + std::fabs(v1)) + (std::fabs(v2) + std::fabs(v3));
            }
        }
    }
    for (; r < rows; ++r, x += ld) {
        const A b = by ? by[r] : A(1), z = by ? by_size[r] : A(1);
        NO_ALIAS
        for (extent i = 0; i < width; ++i) {
            const A v = load(x[i]);
            sums[i] += v * b;
            sizes[i] += std::fabs(v) * z;
        }
    }
}

// The same of the rows, each column times `by` and `by_size`.
template <class T, class A>
void row_sums(const T* x, extent ld, extent rows, extent width, const A* by, const A* by_size, A* sums, A* sizes) {
    for (extent r = 0; r < rows; ++r, x += ld) {
        A sum = 0, size = 0;
        if (by) {
            SUM_OF(sum, size)
            for (extent i = 0; i < width; ++i) {
                const A v = load(x[i]);
                sum += v * by[i];
                size += std::fabs(v) * by_size[i];
            }
        } else {
            SUM_OF(sum, size)
            for (extent i = 0; i < width; ++i) {
                const A v = load(x[i]);
                sum += v;
                size += std::fabs(v);
            }
        }
        sums[r] = sum;
        sizes[r] = size;
    }
}

// Adds to `want` (n) the column sums that a (m, k) times b (k, n) has, and to `bound` those of the magnitudes. A turned operand is stored as its transpose. `scratch`
// (2 k + 2 n).
template <class T>
void product_sums(const T* a, extent a_ld, bool a_turned, const T* b, extent b_ld, bool b_turned, extent m, extent k, extent n, wide<T>* want, wide<T>* bound,
                  wide<T>* scratch) {
    using A = wide<T>;
    A *of_a = scratch, *size_a = of_a + k, *sums = size_a + k, *sizes = sums + n;
    const A* none = nullptr;
    if (a_turned) row_sums<T, A>(a, a_ld, k, m, none, none, of_a, size_a);
    else column_sums<T, A>(a, a_ld, m, k, none, none, of_a, size_a);
    if (b_turned) row_sums<T, A>(b, b_ld, n, k, of_a, size_a, sums, sizes);
    else column_sums<T, A>(b, b_ld, k, n, of_a, size_a, sums, sizes);
    for (extent j = 0; j < n; ++j) want[j] += sums[j], bound[j] += sizes[j];
}

// How far the column sums of c (m, n) are from `want`, as a multiple of what rounding allows (kernels/cpu/products.py). `scratch` (2 n).
template <class T>
double deviation(const T* c, extent ld, extent m, extent n, const wide<T>* want, const wide<T>* bound, double unit, double gamma, double tiny, wide<T>* scratch) {
    using A = wide<T>;
    const A* none = nullptr;
    A *found = scratch, *size = found + n;
    column_sums<T, A>(c, ld, m, n, none, none, found, size);
    double top = 0;
    for (extent j = 0; j < n; ++j) {
        const double ratio = std::fabs(double(found[j]) - double(want[j])) / (unit * double(size[j]) + gamma * double(bound[j]) + tiny);
        if (!(ratio <= top)) top = ratio == ratio ? ratio : double(INFINITY);
    }
    return top;
}

// The sum of `count` parts of `size` numbers, one after the other, in their order, and the word sum of each part, in one reading. `sums` (count + 1): those of the
// parts, and of the sum. Part number `mine` lies at `own`.
template <class T> void add_parts(const T* parts, extent count, extent size, extent mine, const T* own, T* out, std::uint32_t* sums) {
    for (extent p = 0; p <= count; ++p) sums[p] = 0;
    for (extent start = 0; start < size; start += BLOCK) {
        const extent stop = start + BLOCK < size ? start + BLOCK : size;
        for (extent p = 0; p < count; ++p) {
            const T* part = p == mine ? own : parts + p * size;
            sums[p] += word_sum(part + start, (stop - start) * extent(sizeof(T)));
            NO_ALIAS
            for (extent i = start; i < stop; ++i) out[i] = p ? T(out[i] + part[i]) : part[i];
        }
        sums[count] += word_sum(out + start, (stop - start) * extent(sizeof(T)));
    }
}

// total = x, or total + x, and the word sum of the total as it is then.
template <class T, class A> std::uint32_t collect(const T* x, A* total, extent size, bool add) {
    std::uint32_t sum = 0;
    if (add) {
        NO_ALIAS
        for (extent i = 0; i < size; ++i) {
            const A now = total[i] + A(load(x[i]));
            total[i] = now;
            sum += words_of(now);
        }
    } else {
        NO_ALIAS
        for (extent i = 0; i < size; ++i) {
            const A now = A(load(x[i]));
            total[i] = now;
            sum += words_of(now);
        }
    }
    return sum;
}

// Sum of squares in fp64, where those of bf16 and fp32 numbers are exact.
template <class T> double square_sum(const T* x, extent size) {
    double total = 0;
    SUM_OF(total)
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

// Cross-entropy of each row of logits with its label (negative: none, and zeros whatever its logits are); with `gradient` the logits become their gradient.
// `seen` (2), where not null: a look at the logits as they were.
template <class T>
void cross_entropy(T* logits, extent ld, const std::int64_t* labels, wide<T>* losses, wide<T>* scratch, extent rows, extent width, bool gradient,
                   double* seen) {
    using A = wide<T>;
    Look<T> found;
    for (extent r = 0; r < rows; ++r) {
        T* z = logits + r * ld;
        if (seen) found.row(z, width);
        const extent label = labels[r];
        if (label < 0) {
            losses[r] = 0;
            for (extent i = 0; gradient && i < width; ++i) store(z[i], A(0));
            continue;
        }
        const A top = largest(z, width);
        A sum = 0;
        SUM_OF(sum)
        for (extent i = 0; i < width; ++i) {
            scratch[i] = exponential(A(load(z[i])) - top);
            sum += scratch[i];
        }
        const A of_label = A(load(z[label])) - top;
        losses[r] = std::log(sum) - of_label;
        if (!gradient) continue;
        const A by = A(1) / sum;
        NO_ALIAS
        for (extent i = 0; i < width; ++i) store(z[i], scratch[i] * by);
        store(z[label], exponential(of_label) / sum - A(1));
    }
    if (seen) found.tell(seen);
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
        SUM_OF(a, b, c)
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
    void swiglu_forward_##T(const T* gate_up, extent gate_up_ld, T* h, extent h_ld, extent rows, extent width, double* seen) {              \
        swiglu_forward<T>(gate_up, gate_up_ld, h, h_ld, rows, width, seen);                                                                 \
    }                                                                                                                                       \
    void swiglu_backward_##T(const T* gate_up, extent gate_up_ld, const T* dh, extent dh_ld, T* h, extent h_ld, T* d, extent d_ld,          \
                             wide<T>* dots, extent rows, extent width, double* seen) {                                                      \
        swiglu_backward<T>(gate_up, gate_up_ld, dh, dh_ld, h, h_ld, d, d_ld, dots, rows, width, seen);                                      \
    }                                                                                                                                       \
    void scale_rows_##T(const T* x, extent x_ld, const T* by, extent by_ld, T* out, extent out_ld, extent rows, extent width, double* seen) { \
        scale_rows<T>(x, x_ld, by, by_ld, out, out_ld, rows, width, seen);                                                                  \
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
                           int gradient, double* seen) {                                                                                    \
        cross_entropy<T>(logits, ld, labels, losses, scratch, rows, width, gradient != 0, seen);                                            \
    }                                                                                                                                       \
    void sum_rows_##T(const T* y, const std::int64_t* places, extent places_ld, T* out, wide<T>* scratch, extent copies, extent tokens,     \
                      extent width) {                                                                                                       \
        sum_rows<T>(y, places, places_ld, out, scratch, copies, tokens, width);                                                             \
    }                                                                                                                                       \
    double fixed_add_##T(const T* x, std::int64_t* total, extent size, double scale) { return fixed_add<T>(x, total, size, scale); }        \
    void fixed_read_##T(const std::int64_t* total, T* out, extent size, double unit) { fixed_read<T>(total, out, size, unit); }             \
    void fixed_squares_##T(const T* x, extent size, double scale, std::int64_t* sums) { fixed_squares<T>(x, size, scale, sums); }             \
    std::uint32_t collect_##T(const T* x, wide<T>* total, extent size, int add) { return collect(x, total, size, add != 0); }               \
    std::uint32_t word_sum_##T(const T* x, extent size, extent phase) { return word_sum(x, size * extent(sizeof(T)), phase); }              \
    void product_sums_##T(const T* a, extent a_ld, int a_turned, const T* b, extent b_ld, int b_turned, extent m, extent k, extent n,       \
                          wide<T>* want, wide<T>* bound, wide<T>* scratch) {                                                                \
        product_sums<T>(a, a_ld, a_turned != 0, b, b_ld, b_turned != 0, m, k, n, want, bound, scratch);                                     \
    }                                                                                                                                       \
    double deviation_##T(const T* c, extent ld, extent m, extent n, const wide<T>* want, const wide<T>* bound, double unit, double gamma,   \
                         double tiny, wide<T>* scratch) {                                                                                   \
        return deviation<T>(c, ld, m, n, want, bound, unit, gamma, tiny, scratch);                                                          \
    }                                                                                                                                       \
    void look_##T(const T* x, extent ld, extent rows, extent width, double* seen) { look(x, ld, rows, width, seen); }                       \
    double beside_##T(const T* x, extent ld, extent rows, extent width, double largest) { return beside(x, ld, rows, width, largest); }

#define ADAMW(G, O)                                                                                                                         \
    void adamw_##G##_##O(wide<O>* master, const G* grad, wide<O>* average, wide<O>* square, O* out, extent size, double scale, double lr,   \
                         double beta1, double beta2, double eps, double decay, double correction1, double correction2,                      \
                         std::uint32_t* sums) {                                                                                             \
        adamw<G, O>(master, grad, average, square, out, size, scale, lr, beta1, beta2, eps, decay, correction1, correction2, sums);         \
    }

extern "C" {
ROWS(bf16)
ROWS(float)
ROWS(double)
void add_parts_float(const float* parts, extent count, extent size, extent mine, const float* own, float* out, std::uint32_t* sums) {
    add_parts(parts, count, size, mine, own, out, sums);
}
void add_parts_double(const double* parts, extent count, extent size, extent mine, const double* own, double* out, std::uint32_t* sums) {
    add_parts(parts, count, size, mine, own, out, sums);
}
ADAMW(bf16, bf16)
ADAMW(float, bf16)
ADAMW(float, float)
ADAMW(double, double)
}
