// Every instruction set gives the bits of the plain one, for all element types, reductions, numbers of inputs, sizes
// around the block and vector lengths, and unaligned arrays.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/fold.h"

using namespace ferrodist;

namespace {

std::size_t compare(DType dtype, ReduceOp op, InstructionSet instructions, std::mt19937_64& random) {
    const Fold plain = find_fold(dtype, op, InstructionSet::baseline);
    const Fold fast = find_fold(dtype, op, instructions);
    require((plain == nullptr) == (fast == nullptr), "dtype %d, op %d: defined for one set only", int(dtype), int(op));
    if (plain == nullptr) return 0;
    std::size_t num_compared = 0;
    for (const std::size_t num_inputs : {1u, 2u, 3u, 7u}) {
        for (const std::size_t count : {0u, 1u, 7u, 63u, 1023u, 1024u, 1025u, 3001u}) {
            const std::size_t size = count * size_of(dtype);
            const std::size_t shift = size_of(dtype);  // off the vectors' alignment
            std::vector<std::vector<std::byte>> arrays(num_inputs, std::vector<std::byte>(size + shift));
            std::vector<const std::byte*> inputs;
            std::vector<double> factors;
            for (auto& array : arrays) {
                for (auto& byte : array) byte = static_cast<std::byte>(random());
                inputs.push_back(array.data() + shift);
                factors.push_back(static_cast<double>(random() % 1000) / 333.0 - 1.5);
            }
            std::vector<std::byte> expected(size + 1), actual(size + 1);
            plain(expected.data(), inputs.data(), num_inputs, count, factors.data());
            fast(actual.data(), inputs.data(), num_inputs, count, factors.data());
            std::vector<std::byte> in_place = arrays.back();
            inputs.back() = in_place.data() + shift;
            fast(in_place.data() + shift, inputs.data(), num_inputs, count, factors.data());
            for (std::size_t i = 0; i < size; ++i) {
                require(expected[i] == actual[i],  // random bytes hold many NaN, of which arithmetic makes one
                        "dtype %d, op %d, %zu inputs of %zu elements: byte %zu", int(dtype), int(op), num_inputs, count,
                        i);
                require(expected[i] == in_place[i + shift], "the same in place");
            }
            num_compared += count;
        }
    }
    return num_compared;
}

}  // namespace

int main() {
    std::mt19937_64 random(7);
    std::size_t num_compared = 0;
    const InstructionSet best = best_instruction_set();
    for (int set = 0; set <= static_cast<int>(best); ++set)
        for (int dtype = 0; dtype < num_dtypes; ++dtype)
            for (int op = 0; op < num_reduce_ops; ++op)
                num_compared += compare(static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                                        static_cast<InstructionSet>(set), random);
    std::printf("%zu elements compared, up to instruction set %d\n", num_compared, static_cast<int>(best));
    require(num_compared > 0, "nothing was compared");
}
