// Tiny tensors whose elements travel with the comparison of calls, for backends that move bytes in Python: a table has
// a record for each rank, in which a rank's elements begin at a fixed place.
#include "bindings/eager_tensors.h"

#include <nanobind/stl/optional.h>

#include <cstring>
#include <optional>
#include <vector>

#include "bindings/fast_call.h"
#include "bindings/tensor.h"

namespace ferrodist {

using namespace nanobind::literals;

namespace {

// An element of each rank begins at a multiple of this many bytes while they are folded.
constexpr std::size_t row_alignment = 64;

// The elements of all ranks in a table.
struct Payloads {
    const std::byte* begin;
    std::size_t stride;

    Payloads(nb::bytes table, std::size_t num_ranks, std::size_t start)
        : begin(reinterpret_cast<const std::byte*>(table.c_str()) + start), stride(table.size() / num_ranks) {}

    [[nodiscard]] const std::byte* of(std::size_t rank) const { return begin + rank * stride; }
};

// The elements of a tensor that is to be sent, of at most `limit` bytes; nothing if the general path is to check the
// call. `out`, unless it is None, has the tensor's shape, or for a `factor` so many times its length in dim 0.
std::optional<nb::bytes> elements_to_send(nb::handle tensor, nb::handle out, int factor, int op, std::size_t limit) {
    const auto source = view_tensor(tensor.ptr());
    if (!source) return std::nullopt;
    const std::size_t size = source->count * size_of(source->dtype);
    if (size > limit || (op >= 0 && !reduction_of(source->dtype, op))) return std::nullopt;
    if (!out.is_none()) {
        const auto pair = view_pair(tensor, out);
        if (!pair) return std::nullopt;
        const bool fits_out = factor == 0 ? std::ranges::equal(pair->source.shape, pair->out.shape)
                                          : fits(pair->out.shape, pair->source.shape, factor);
        const bool may_overlap = factor == 0 && pair->source.data == pair->out.data;
        if (!fits_out || (!may_overlap && overlap(*pair))) return std::nullopt;
    }
    return nb::bytes(source->data, size);
}

// A result that has room for `size` bytes: another thread may have resized it since its call was checked.
std::optional<TensorView> view_result(nb::handle out, std::size_t size) {
    auto view = view_tensor(out.ptr());
    if (view && view->count * size_of(view->dtype) != size) view.reset();
    return view;
}

bool fold_elements(nb::handle out, nb::bytes table, std::size_t num_ranks, std::size_t start, std::size_t size,
                   int op) {
    const auto view = view_result(out, size);
    const Fold fold = view ? find_fold(view->dtype, static_cast<ReduceOp>(op), best_instruction_set()) : nullptr;
    if (fold == nullptr) return false;
    const std::size_t row = (size / row_alignment + 1) * row_alignment;
    std::vector<std::byte> room(row * num_ranks + row_alignment);
    void* aligned = room.data();
    std::size_t space = room.size();
    auto* rows = static_cast<std::byte*>(std::align(row_alignment, row * num_ranks, aligned, space));
    std::vector<const std::byte*> inputs(num_ranks);
    const Payloads payloads(table, num_ranks, start);
    for (std::size_t r = 0; r < num_ranks; ++r) {
        copy_bytes(rows + r * row, payloads.of(r), size);
        inputs[r] = rows + r * row;
    }
    const auto divisor = static_cast<double>(num_ranks);  // of a mean
    fold(view->data, inputs.data(), inputs.size(), view->count, &divisor);
    return mark_written(out.ptr());
}

// Writes the elements of so many ranks from `first` on one after the other, `size` bytes of each.
bool join_elements(nb::handle out, nb::bytes table, std::size_t num_ranks, std::size_t start, std::size_t size,
                   std::size_t first, std::size_t num_joined) {
    const auto view = view_result(out, size * num_joined);
    if (!view) return false;
    const Payloads payloads(table, num_ranks, start);
    for (std::size_t r = 0; r < num_joined; ++r) copy_bytes(view->data + r * size, payloads.of(first + r), size);
    return mark_written(out.ptr());
}

}  // namespace

void bind_eager_tensors(nb::module_& m) {
    m.def("eager_elements", &elements_to_send, "tensor"_a, "out"_a.none(), "factor"_a, "op"_a, "limit"_a,
          "The bytes of a tensor to send with a call; None if the general path is to check the call. `out` is None, or"
          " `factor` times as long in dim 0, or for 0 of the same shape; `op` is the number of a reduction, or -1.");
    m.def("fold_eager", &fold_elements, "out"_a, "table"_a, "num_ranks"_a, "start"_a, "size"_a, "op"_a,
          "Fold the `size` bytes that each rank has sent into `out`; False if it has another size now.");
    m.def(
        "join_eager", &join_elements, "out"_a, "table"_a, "num_ranks"_a, "start"_a, "size"_a, "first"_a, "num_joined"_a,
        "Copy the `size` bytes that each of so many ranks from `first` on has sent into `out`; False if it has another"
        " size now.");
}

}  // namespace ferrodist
