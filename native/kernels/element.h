// Element types and reduce operations, numbered as on the Python side.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ferrodist {

enum class DType : std::uint8_t {
    float64,
    float32,
    float16,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    int8,
    int16,
    int32,
    int64,
    uint8,
    boolean,
    complex64,
    complex128,
};
inline constexpr int num_dtypes = 14;

enum class ReduceOp : std::uint8_t { sum, mean, min, max, product, band, bor, bxor, premultiplied_sum };
inline constexpr int num_reduce_ops = 9;

constexpr std::size_t size_of(DType dtype) {
    switch (dtype) {
        case DType::complex128:
            return 16;
        case DType::float64:
        case DType::int64:
        case DType::complex64:
            return 8;
        case DType::float32:
        case DType::int32:
            return 4;
        case DType::float16:
        case DType::bfloat16:
        case DType::int16:
            return 2;
        default:
            return 1;
    }
}

}  // namespace ferrodist
