#include "kernels/fold.h"

namespace ferrodist {

namespace baseline {
Fold find(DType dtype, ReduceOp op);
}
#if defined(__x86_64__)
namespace avx2 {
Fold find(DType dtype, ReduceOp op);
}
namespace avx512 {
Fold find(DType dtype, ReduceOp op);
}
#endif

InstructionSet best_instruction_set() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return InstructionSet::avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return InstructionSet::avx2;
#endif
    return InstructionSet::baseline;
}

Fold find_fold(DType dtype, ReduceOp op, InstructionSet instructions) {
#if defined(__x86_64__)
    if (instructions == InstructionSet::avx512) return avx512::find(dtype, op);
    if (instructions == InstructionSet::avx2) return avx2::find(dtype, op);
#else
    (void)instructions;
#endif
    return baseline::find(dtype, op);
}

}  // namespace ferrodist
