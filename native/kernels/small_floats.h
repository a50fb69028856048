// float16, bfloat16 and 8-bit floats to float32 and back, rounding to nearest even. A NaN becomes one without a sign,
// the same for all: which of two NaNs a sum is, and with which sign, differs between processors. Included by each
// instruction set's folds, so everything is in that set's namespace.
#ifndef FERRODIST_INSTRUCTIONS
#error "define FERRODIST_INSTRUCTIONS to the namespace of the instruction set first"
#endif

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace ferrodist::FERRODIST_INSTRUCTIONS {

struct Float16 {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};
struct Float8E4M3 {
    std::uint8_t bits;
};
struct Float8E5M2 {
    std::uint8_t bits;
};

inline float float_of(std::uint32_t bits) {
    return __builtin_bit_cast(float, bits);
}

inline std::uint32_t bits_of(float x) {
    return __builtin_bit_cast(std::uint32_t, x);
}

inline float widen(BFloat16 x) {
    return float_of(static_cast<std::uint32_t>(x.bits) << 16);
}

inline void narrow(float x, BFloat16& out) {
    const auto bits = bits_of(x);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<std::uint16_t>(x != x ? 0x7FC0u : rounded);
}

// A float with `exponent_bits` and `mantissa_bits`, whose largest exponent means infinity and NaN.
template <int exponent_bits, int mantissa_bits>
inline float widen_ieee(std::uint32_t bits) {
    constexpr std::uint32_t bias = (1u << (exponent_bits - 1)) - 1u;
    constexpr std::uint32_t magnitude_mask = (1u << (exponent_bits + mantissa_bits)) - 1u;
    const std::uint32_t sign = (bits >> (exponent_bits + mantissa_bits)) << 31;
    const std::uint32_t magnitude = bits & magnitude_mask;
    // Shifted into place the exponent is too small by 127 - bias, which a multiplication mends, exactly, and for
    // subnormal numbers too; infinity and NaN get the largest exponent of float32 instead.
    const float scaled = float_of(magnitude << (23 - mantissa_bits)) * float_of((127u + 127u - bias) << 23);
    const bool special = magnitude >= (((1u << exponent_bits) - 1u) << mantissa_bits);
    const std::uint32_t value = special ? (magnitude << (23 - mantissa_bits)) | 0x7F800000u : bits_of(scaled);
    return float_of(sign | value);
}

// Rounds a float32 to a float with fewer bits. Returns the magnitude, which may be larger than the type's largest.
template <int exponent_bits, int mantissa_bits>
inline std::uint32_t round_magnitude(float x) {
    constexpr std::uint32_t bias = (1u << (exponent_bits - 1)) - 1u;
    constexpr std::uint32_t smallest_normal = (127u - bias + 1u) << 23;
    constexpr int shift = 23 - mantissa_bits;
    const std::uint32_t magnitude = bits_of(x) & 0x7FFFFFFFu;
    // Subnormal results: adding a float whose unit in the last place is the smallest subnormal number rounds there.
    constexpr std::uint32_t anchor = (127u - bias + 1u + static_cast<std::uint32_t>(shift)) << 23;
    const float anchored = float_of(magnitude) + float_of(anchor);
    const std::uint32_t subnormal = bits_of(anchored) - anchor;
    const std::uint32_t odd = (magnitude >> shift) & 1u;
    const std::uint32_t normal = (magnitude - ((127u - bias) << 23) + (1u << (shift - 1)) - 1u + odd) >> shift;
    return magnitude < smallest_normal ? subnormal : normal;
}

inline std::uint32_t sign_of(float x) {
    return bits_of(x) >> 31;
}

inline float widen(Float16 x) {
    return widen_ieee<5, 10>(x.bits);
}

inline void narrow(float x, Float16& out) {
    constexpr std::uint32_t infinity = 0x7C00u;
    const std::uint32_t rounded = round_magnitude<5, 10>(x);
    const std::uint32_t finite = rounded < infinity ? rounded : infinity;
    out.bits = static_cast<std::uint16_t>(x != x ? 0x7E00u : (sign_of(x) << 15) | finite);
}

inline float widen(Float8E5M2 x) {
    return widen_ieee<5, 2>(x.bits);
}

inline void narrow(float x, Float8E5M2& out) {
    constexpr std::uint32_t infinity = 0x7Cu;
    const std::uint32_t rounded = round_magnitude<5, 2>(x);
    const std::uint32_t finite = rounded < infinity ? rounded : infinity;
    out.bits = static_cast<std::uint8_t>(x != x ? 0x7Fu : (sign_of(x) << 7) | finite);
}

inline float widen(Float8E4M3 x) {
    // No infinity: only all ones is special, so the exponents need no repair.
    const std::uint32_t magnitude = x.bits & 0x7Fu;
    const float scaled = float_of(magnitude << 20) * float_of((127u + 120u) << 23);
    const std::uint32_t value = magnitude == 0x7Fu ? 0x7FC00000u : bits_of(scaled);
    return float_of((static_cast<std::uint32_t>(x.bits >> 7) << 31) | value);
}

inline void narrow(float x, Float8E4M3& out) {
    // What is too large becomes the largest finite number, as in torch since 2.13 (NaN before).
    constexpr std::uint32_t largest = 0x7Eu;
    const std::uint32_t rounded = round_magnitude<4, 3>(x);
    const std::uint32_t finite = rounded < largest ? rounded : largest;
    out.bits = static_cast<std::uint8_t>(x != x ? 0x7Fu : (sign_of(x) << 7) | finite);
}

// Whole arrays; the loops above become vector code by themselves, for float16 there are instructions.

template <class T>
inline void widen_array(const T* source, float* out, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) out[i] = widen(source[i]);
}

template <class T>
inline void narrow_array(const float* source, T* out, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) narrow(source[i], out[i]);
}

#if defined(__F16C__)
inline void widen_array(const Float16* source, float* out, std::size_t count) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(packed));
    }
    for (; i < count; ++i) out[i] = widen(source[i]);
}

inline void narrow_array(const float* source, Float16* out, std::size_t count) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256 read = _mm256_loadu_ps(source + i);
        const __m256 is_nan = _mm256_cmp_ps(read, read, _CMP_UNORD_Q);  // the conversion would keep part of its bits
        const __m256 wide = _mm256_blendv_ps(read, _mm256_set1_ps(float_of(0x7FC00000u)), is_nan);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < count; ++i) narrow(source[i], out[i]);
}
#endif

}  // namespace ferrodist::FERRODIST_INSTRUCTIONS
