// The arithmetic of reductions. Its results are bitwise as [Note: fold] of `collectives/reduce_op.py` defines.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/element.h"

namespace ferrodist {

// Folds `count` elements of `num_inputs` arrays, in their order, into `out`, which may be one of them.
// `factors` holds one factor an input for premultiplied sums, the divisor for MEAN, and is not read otherwise.
using Fold = void (*)(std::byte* out, const std::byte* const* inputs, std::size_t num_inputs, std::size_t count,
                      const double* factors);

// The instruction set of a fold. All give the same bits.
enum class InstructionSet : std::uint8_t { baseline, avx2, avx512 };

// The best one that this processor supports.
InstructionSet best_instruction_set();

// The fold for a reduction, or null if it is undefined.
Fold find_fold(DType dtype, ReduceOp op, InstructionSet instructions);

}  // namespace ferrodist
