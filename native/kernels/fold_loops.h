// The folds, written once as plain loops and compiled for each instruction set: the same arithmetic element by element
// (no contraction to fused multiply-add, no reordering), so the bits do not depend on the instruction set.
#ifndef FERRODIST_INSTRUCTIONS
#error "define FERRODIST_INSTRUCTIONS to the namespace of the instruction set first"
#endif

#include <type_traits>

#include "kernels/fold.h"
#include "kernels/small_floats.h"

namespace ferrodist::FERRODIST_INSTRUCTIONS {
namespace {

// Elements per block: their accumulators stay in the first-level cache.
constexpr std::size_t block = 1024;
constexpr std::size_t wide_count = 8;  // floats per register

// Nothing here may call an inline function of another namespace that is not surely inlined: the linker keeps one copy
// of such a function for all files, and may keep the one with this file's instructions.

inline std::size_t smaller(std::size_t a, std::size_t b) {
    return a < b ? a : b;
}

template <class T>
void copy(const T* source, std::size_t count, T* out) {
    __builtin_memcpy(out, source, count * sizeof(T));
}

struct Sum {
    template <class T>
    static T apply(T a, T b) {
        if constexpr (std::is_integral_v<T>) {
            using U = std::make_unsigned_t<T>;
            return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
        } else {
            return a + b;
        }
    }
};

struct Product {
    template <class T>
    static T apply(T a, T b) {
        if constexpr (std::is_integral_v<T>) {
            // At least 32 bits wide, for narrow unsigned types would be promoted to int and could overflow it.
            using U = std::conditional_t<(sizeof(T) < 4), std::uint32_t, std::make_unsigned_t<T>>;
            return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
        } else {
            return a * b;
        }
    }
};

struct Min {
    template <class T>
    static T apply(T a, T b) {
        if constexpr (std::is_floating_point_v<T>) {
            return (b < a || (b != b && a == a)) ? b : a;
        } else {
            return b < a ? b : a;
        }
    }
};

struct Max {
    template <class T>
    static T apply(T a, T b) {
        if constexpr (std::is_floating_point_v<T>) {
            return (b > a || (b != b && a == a)) ? b : a;
        } else {
            return b > a ? b : a;
        }
    }
};

struct And {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a & b);
    }
};

struct Or {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a | b);
    }
};

struct Xor {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a ^ b);
    }
};

// Canonicalizes NaNs from arithmetic; see small_floats.h. MIN and MAX select an input, which stays as it is.
template <class Op, class T>
T settled(T x) {
    if constexpr (std::is_floating_point_v<T> && (std::is_same_v<Op, Sum> || std::is_same_v<Op, Product>)) {
        return x != x ? static_cast<T>(__builtin_nan("")) : x;
    } else {
        return x;
    }
}

template <class T>
const T* as(const std::byte* data) {
    return reinterpret_cast<const T*>(data);
}

template <class T>
T* as(std::byte* data) {
    return reinterpret_cast<T*>(data);
}

// `out` may be one of the inputs: element i of the output depends on element i of the inputs and no other, so the
// loops have no dependence between iterations, which `ivdep` says.

template <class T, class Op>
void fold_plain(std::byte* out_bytes, const std::byte* const* inputs, std::size_t num_inputs, std::size_t count,
                const double* /*factors*/) {
    T* out = as<T>(out_bytes);
    if (num_inputs == 2) {
        const T* a = as<T>(inputs[0]);
        const T* b = as<T>(inputs[1]);
#pragma GCC ivdep
        for (std::size_t i = 0; i < count; ++i) out[i] = settled<Op>(Op::apply(a[i], b[i]));
        return;
    }
    T accumulator[block];
    for (std::size_t start = 0; start < count; start += block) {
        const std::size_t size = smaller(block, count - start);
        copy(as<T>(inputs[0]) + start, size, accumulator);
        for (std::size_t r = 1; r < num_inputs; ++r) {
            const T* x = as<T>(inputs[r]) + start;
            for (std::size_t i = 0; i < size; ++i) accumulator[i] = Op::apply(accumulator[i], x[i]);
        }
        for (std::size_t i = 0; i < size; ++i) out[start + i] = settled<Op>(accumulator[i]);
    }
}

template <class T>
void fold_mean(std::byte* out_bytes, const std::byte* const* inputs, std::size_t num_inputs, std::size_t count,
               const double* factors) {
    fold_plain<T, Sum>(out_bytes, inputs, num_inputs, count, factors);
    T* out = as<T>(out_bytes);
    const T divisor = static_cast<T>(factors[0]);
    for (std::size_t i = 0; i < count; ++i) out[i] = out[i] / divisor;
}

template <class T>
void fold_premultiplied(std::byte* out_bytes, const std::byte* const* inputs, std::size_t num_inputs, std::size_t count,
                        const double* factors) {
    T accumulator[block];
    for (std::size_t start = 0; start < count; start += block) {
        const std::size_t size = smaller(block, count - start);
        const T first = static_cast<T>(factors[0]);
        const T* x0 = as<T>(inputs[0]) + start;
        for (std::size_t i = 0; i < size; ++i) accumulator[i] = x0[i] * first;
        for (std::size_t r = 1; r < num_inputs; ++r) {
            const T factor = static_cast<T>(factors[r]);
            const T* x = as<T>(inputs[r]) + start;
            for (std::size_t i = 0; i < size; ++i) accumulator[i] = accumulator[i] + x[i] * factor;
        }
        T* out = as<T>(out_bytes) + start;
        for (std::size_t i = 0; i < size; ++i) out[i] = settled<Sum>(accumulator[i]);
    }
}

// Two arrays of small floats; unlike `fold_small`, no float32 goes through memory.
template <class T, class Op>
void fold_two_small(T* out, const T* a, const T* b, std::size_t count) {
    std::size_t i = 0;
#if defined(__F16C__)
    if constexpr (std::is_same_v<T, Float16>)
        for (; i + wide_count <= count; i += wide_count) {
            float x[wide_count];
            float y[wide_count];
            widen_array(a + i, x, wide_count);
            widen_array(b + i, y, wide_count);
            for (std::size_t k = 0; k < wide_count; ++k) x[k] = Op::apply(x[k], y[k]);
            narrow_array(x, out + i, wide_count);
        }
#endif
#pragma GCC ivdep
    for (; i < count; ++i) narrow(Op::apply(widen(a[i]), widen(b[i])), out[i]);
}

// Small floats: widened, folded in float32, rounded once.
template <class T, class Op, bool is_mean, bool is_premultiplied>
void fold_small(std::byte* out_bytes, const std::byte* const* inputs, std::size_t num_inputs, std::size_t count,
                const double* factors) {
    if constexpr (!is_mean && !is_premultiplied) {
        if (num_inputs == 2) return fold_two_small<T, Op>(as<T>(out_bytes), as<T>(inputs[0]), as<T>(inputs[1]), count);
    }
    float accumulator[block];
    float wide[block];
    for (std::size_t start = 0; start < count; start += block) {
        const std::size_t size = smaller(block, count - start);
        widen_array(as<T>(inputs[0]) + start, accumulator, size);
        if constexpr (is_premultiplied) {
            const auto factor = static_cast<float>(factors[0]);
            for (std::size_t i = 0; i < size; ++i) accumulator[i] = accumulator[i] * factor;
        }
        for (std::size_t r = 1; r < num_inputs; ++r) {
            widen_array(as<T>(inputs[r]) + start, wide, size);
            if constexpr (is_premultiplied) {
                const auto factor = static_cast<float>(factors[r]);
                for (std::size_t i = 0; i < size; ++i) wide[i] = wide[i] * factor;
            }
            for (std::size_t i = 0; i < size; ++i) accumulator[i] = Op::apply(accumulator[i], wide[i]);
        }
        if constexpr (is_mean) {
            const auto divisor = static_cast<float>(factors[0]);
            for (std::size_t i = 0; i < size; ++i) accumulator[i] = accumulator[i] / divisor;
        }
        narrow_array(accumulator, as<T>(out_bytes) + start, size);
    }
}

template <class Op>
void fold_bool(std::byte* out_bytes, const std::byte* const* inputs, std::size_t num_inputs, std::size_t count,
               const double* /*factors*/) {
    std::uint8_t accumulator[block];
    for (std::size_t start = 0; start < count; start += block) {
        const std::size_t size = smaller(block, count - start);
        const std::uint8_t* x0 = as<std::uint8_t>(inputs[0]) + start;
        for (std::size_t i = 0; i < size; ++i) accumulator[i] = x0[i] != 0;
        for (std::size_t r = 1; r < num_inputs; ++r) {
            const std::uint8_t* x = as<std::uint8_t>(inputs[r]) + start;
            for (std::size_t i = 0; i < size; ++i)
                accumulator[i] = Op::apply(accumulator[i], static_cast<std::uint8_t>(x[i] != 0));
        }
        copy(accumulator, size, as<std::uint8_t>(out_bytes) + start);
    }
}

template <class T>
void fold_complex_product(std::byte* out_bytes, const std::byte* const* inputs, std::size_t num_inputs,
                          std::size_t count, const double* /*factors*/) {
    T real[block];
    T imaginary[block];
    for (std::size_t start = 0; start < count; start += block) {
        const std::size_t size = smaller(block, count - start);
        const T* x0 = as<T>(inputs[0]) + 2 * start;
        for (std::size_t i = 0; i < size; ++i) {
            real[i] = x0[2 * i];
            imaginary[i] = x0[2 * i + 1];
        }
        for (std::size_t r = 1; r < num_inputs; ++r) {
            const T* x = as<T>(inputs[r]) + 2 * start;
            for (std::size_t i = 0; i < size; ++i) {
                const T a = real[i];
                const T b = imaginary[i];
                const T c = x[2 * i];
                const T d = x[2 * i + 1];
                real[i] = a * c - b * d;
                imaginary[i] = a * d + b * c;
            }
        }
        T* out = as<T>(out_bytes) + 2 * start;
        for (std::size_t i = 0; i < size; ++i) {
            out[2 * i] = settled<Product>(real[i]);
            out[2 * i + 1] = settled<Product>(imaginary[i]);
        }
    }
}

// Complex numbers are folded as pairs of real ones, except in products.
template <Fold fold>
void fold_pairs(std::byte* out, const std::byte* const* inputs, std::size_t num_inputs, std::size_t count,
                const double* factors) {
    fold(out, inputs, num_inputs, 2 * count, factors);
}

template <class T>
Fold find_float(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
            return fold_plain<T, Sum>;
        case ReduceOp::mean:
            return fold_mean<T>;
        case ReduceOp::min:
            return fold_plain<T, Min>;
        case ReduceOp::max:
            return fold_plain<T, Max>;
        case ReduceOp::product:
            return fold_plain<T, Product>;
        case ReduceOp::premultiplied_sum:
            return fold_premultiplied<T>;
        default:
            return nullptr;
    }
}

template <class T>
Fold find_small_float(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
            return fold_small<T, Sum, false, false>;
        case ReduceOp::mean:
            return fold_small<T, Sum, true, false>;
        case ReduceOp::min:
            return fold_small<T, Min, false, false>;
        case ReduceOp::max:
            return fold_small<T, Max, false, false>;
        case ReduceOp::product:
            return fold_small<T, Product, false, false>;
        case ReduceOp::premultiplied_sum:
            return fold_small<T, Sum, false, true>;
        default:
            return nullptr;
    }
}

template <class T>
Fold find_integer(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
            return fold_plain<T, Sum>;
        case ReduceOp::min:
            return fold_plain<T, Min>;
        case ReduceOp::max:
            return fold_plain<T, Max>;
        case ReduceOp::product:
            return fold_plain<T, Product>;
        case ReduceOp::band:
            return fold_plain<T, And>;
        case ReduceOp::bor:
            return fold_plain<T, Or>;
        case ReduceOp::bxor:
            return fold_plain<T, Xor>;
        default:
            return nullptr;
    }
}

inline Fold find_bool(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
        case ReduceOp::max:
        case ReduceOp::bor:
            return fold_bool<Or>;
        case ReduceOp::product:
        case ReduceOp::min:
        case ReduceOp::band:
            return fold_bool<And>;
        case ReduceOp::bxor:
            return fold_bool<Xor>;
        default:
            return nullptr;
    }
}

template <class T>
Fold find_complex(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
            return fold_pairs<fold_plain<T, Sum>>;
        case ReduceOp::mean:
            return fold_pairs<fold_mean<T>>;
        case ReduceOp::product:
            return fold_complex_product<T>;
        case ReduceOp::premultiplied_sum:
            return fold_pairs<fold_premultiplied<T>>;
        default:
            return nullptr;
    }
}

}  // namespace

Fold find(DType dtype, ReduceOp op) {
    switch (dtype) {
        case DType::float64:
            return find_float<double>(op);
        case DType::float32:
            return find_float<float>(op);
        case DType::float16:
            return find_small_float<Float16>(op);
        case DType::bfloat16:
            return find_small_float<BFloat16>(op);
        case DType::float8_e4m3fn:
            return find_small_float<Float8E4M3>(op);
        case DType::float8_e5m2:
            return find_small_float<Float8E5M2>(op);
        case DType::int8:
            return find_integer<std::int8_t>(op);
        case DType::int16:
            return find_integer<std::int16_t>(op);
        case DType::int32:
            return find_integer<std::int32_t>(op);
        case DType::int64:
            return find_integer<std::int64_t>(op);
        case DType::uint8:
            return find_integer<std::uint8_t>(op);
        case DType::boolean:
            return find_bool(op);
        case DType::complex64:
            return find_complex<float>(op);
        case DType::complex128:
            return find_complex<double>(op);
    }
    return nullptr;
}

}  // namespace ferrodist::FERRODIST_INSTRUCTIONS
