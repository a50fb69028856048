#include "bindings/fast_sized.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "bindings/shared_sizes.h"

namespace ferrodist {

namespace {

// Elements of so many bytes follow their head. With two ranks on two processors a second meeting took 0.4 us. A gather
// of 1 KiB won 0.3 us by one meeting and one of 4 KiB lost 0.5, for elements are copied once more; a scatter of 1 KiB
// lost 0.4, for every rank reads all of them.
constexpr std::size_t few_bytes = 512;

std::string_view few_elements(const TensorView& tensor) {
    const std::size_t size = tensor.count * size_of(tensor.dtype);
    return size <= few_bytes ? std::string_view(reinterpret_cast<const char*>(tensor.data), size) : std::string_view();
}

void copy_text(std::byte* out, std::string_view bytes) {
    copy_bytes(out, reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
}

// Whether `out` has the shape of `rows` rows of `part`, and the same dtype.
bool fits_rows(const TensorView& out, const TensorView& part, std::size_t rows) {
    return out.dtype == part.dtype && out.shape.size() == part.shape.size() &&
           out.shape[0] == static_cast<std::int64_t>(rows) &&
           std::equal(out.shape.begin() + 1, out.shape.end(), part.shape.begin() + 1);
}

// Runs the collective that moves the elements; `fact` is for its error.
template <class Collective>
PyObject* move_elements(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::object result,
                        std::size_t size, const std::vector<std::size_t>& counts, const char* fact, int value,
                        const Collective& collective) {
    try {
        run_collective(path, size, collective);
    } catch (...) {
        const nb::list elements = as_list(counts);
        const nb::object number = nb::int_(value);
        raise_for(path, operation, tensor, result, {{"counts", elements.ptr()}, {fact, number.ptr()}});
        return nullptr;
    }
    return mark_written(result.ptr()) ? result.release().ptr() : nullptr;
}

// Copies the elements of all parts, one after the other.
void join_parts(std::byte* out, const Payloads& payloads) {
    for (std::size_t r = 0; r < payloads.size(); ++r) {
        const std::string_view elements = payloads[r].substr(sizeof(PartHead));
        copy_text(out, elements);
        out += elements.size();
    }
}

// all_gather_uneven, and gather to `root`; -1 is none.
PyObject* concatenate(const OpenFastPath& path, const char* name, nb::handle tensor, nb::handle out, int root) {
    const bool has_result = root < 0 || root == path.communicator->rank();
    const auto part = view_tensor(tensor.ptr());
    if (!part || part->shape.empty()) Py_RETURN_NONE;
    if (!out.is_none()) {  // what the general path refuses before ranks share their sizes
        const auto target = view_tensor(out.ptr());
        if (!has_result || !target || target->dtype != part->dtype) Py_RETURN_NONE;
    }
    const Rest rest(path);
    const PartHead own{.size = part->shape[0],
                       .row = static_cast<std::int64_t>(row_elements(part->shape)),
                       .num_dims = static_cast<std::int16_t>(part->shape.size()),
                       .root = root,
                       .dtype = static_cast<std::uint8_t>(part->dtype)};
    Payloads payloads;
    if (!share_payloads(path, name, own.bytes(), few_elements(*part), payloads)) return nullptr;
    const auto parts = parts_in(payloads, own);
    if (!parts) return as_list(payloads);
    const std::size_t total = std::accumulate(parts->rows.begin(), parts->rows.end(), std::size_t{0});
    const nb::object result = out_or_new(out, tensor, has_result ? Shape::rows : Shape::nothing, total);
    if (!result.is_valid()) return parts->have_come ? nullptr : fail_after_share(path, name);
    const auto pair = view_pair(tensor, result);
    if (!pair || (has_result && !fits_rows(pair->out, pair->source, total))) return as_list(payloads);
    if (parts->have_come) {
        if (has_result) join_parts(pair->out.data, payloads);
        return mark_written(result.ptr()) ? result.inc_ref().ptr() : nullptr;
    }
    if (has_result && overlap(*pair)) return as_list(payloads);
    std::vector<std::size_t> counts = parts->rows;
    for (std::size_t& count : counts) count *= row_elements(pair->source.shape);
    const auto move = [&](const char* operation, const char* fact, int value, const auto& collective) {
        return move_elements(rest.path(), operation, tensor, result, size_of_pair(*pair), counts, fact, value,
                             collective);
    };
    if (root < 0)
        return move("all_gather", "dim", 0, [&](Context& context, const Deadline& deadline) {
            all_gather(context, pair->out.data, pair->source.data, counts, pair->source.dtype, 0, deadline);
        });
    return move("gather", "root", root, [&](Context& context, const Deadline& deadline) {
        gather(context, pair->out.data, pair->source.data, counts, pair->source.dtype, root, deadline);
    });
}

PyObject* fast_all_gather_uneven(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5 || index_of(arguments[1]) != 0) Py_RETURN_NONE;
    const auto path = find_fast_path(arguments[2], arguments[4]);
    if (!path) Py_RETURN_NONE;
    return concatenate(*path, "all_gather_uneven", arguments[0], arguments[3], -1);
}

PyObject* fast_gather(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6 || index_of(arguments[2]) != 0) Py_RETURN_NONE;
    const auto path = find_fast_path(arguments[3], arguments[5]);
    const int root = index_of(arguments[1]);
    if (!path || root < 0 || root >= path->communicator->num_ranks()) Py_RETURN_NONE;
    return concatenate(*path, "gather", arguments[0], arguments[4], root);
}

// The head of a scatter: `_SCATTER_CALL` of collectives/gather.py, and on the root `_SCATTER_HEAD` and the shape.
constexpr std::size_t most_dims = 12;

#pragma pack(push, 1)
struct ScatterHead {
    std::int32_t dim = 0;
    std::int32_t root = 0;
    std::uint8_t dtype = 0;  // as in `DType`
    std::uint8_t flags = 0;  // not 0 of what is not plain
    std::uint8_t num_dims = 0;
    std::array<std::int64_t, most_dims> shape = {};

    [[nodiscard]] std::size_t num_bytes() const { return sizeof *this - (most_dims - num_dims) * sizeof shape[0]; }
};
#pragma pack(pop)
static_assert(sizeof(ScatterHead) == 107);
constexpr std::size_t scatter_call_bytes = 8;  // of the head: what every rank sends

// The root's head, if all ranks' payloads are those of plain calls with dim 0 that fit together.
std::optional<ScatterHead> scatter_in(const Payloads& payloads, int root) {
    for (std::size_t r = 0; r < payloads.size(); ++r) {
        const bool is_root = r == static_cast<std::size_t>(root);
        if (is_root ? payloads[r].size() < scatter_call_bytes : payloads[r].size() != scatter_call_bytes)
            return std::nullopt;
        std::array<std::int32_t, 2> call;
        std::memcpy(&call, payloads[r].data(), sizeof call);
        if (call[0] != 0 || call[1] != root) return std::nullopt;
    }
    ScatterHead head;
    const std::string_view sent = payloads[static_cast<std::size_t>(root)];
    std::memcpy(&head, sent.data(), std::min(sizeof head, sent.size()));
    if (head.num_dims < 1 || head.num_dims > most_dims || head.dtype >= num_dtypes || head.flags != 0)
        return std::nullopt;
    if (sent.size() < head.num_bytes()) return std::nullopt;
    const auto shape = head.shape;  // aligned
    const std::span<const std::int64_t> sizes(shape.data(), head.num_dims);
    if (!std::ranges::all_of(sizes, [](std::int64_t size) { return size >= 0 && size <= most_elements; }))
        return std::nullopt;
    const std::size_t come = sent.size() - head.num_bytes();
    if (come != 0 && !is_size_of(come, sizes, static_cast<DType>(head.dtype))) return std::nullopt;
    return head;
}

// Copies rank `rank`'s part of joined parts, of `counts` elements each.
void copy_part(std::byte* out, std::string_view joined, std::span<const std::size_t> counts, std::size_t rank,
               std::size_t element_size) {
    const auto before = counts.first(rank);
    const std::size_t start = std::accumulate(before.begin(), before.end(), std::size_t{0}) * element_size;
    copy_text(out, joined.substr(start, counts[rank] * element_size));
}

PyObject* fast_scatter(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6 || index_of(arguments[2]) != 0) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], out = arguments[4];
    const auto path = find_fast_path(arguments[3], arguments[5]);
    const int root = index_of(arguments[1]);
    if (!path || root < 0 || root >= path->communicator->num_ranks()) Py_RETURN_NONE;
    const std::size_t ranks = path->num_ranks();
    const auto own_rank = static_cast<std::size_t>(path->communicator->rank());
    const bool is_root = own_rank == static_cast<std::size_t>(root);
    // The rows of rank r's part, as `compute_shard_sizes` divides them.
    const auto rows_of = [&](std::int64_t total, std::size_t r) {
        return (static_cast<std::size_t>(total) + ranks - 1 - r) / ranks;
    };
    ScatterHead head;
    head.root = root;
    std::optional<TensorView> whole;
    const auto target = out.is_none() ? std::nullopt : view_tensor(out.ptr());
    if (!out.is_none() && !target) Py_RETURN_NONE;
    if (is_root) {
        whole = view_tensor(tensor.ptr());
        if (!whole || whole->shape.empty() || whole->shape.size() > most_dims) Py_RETURN_NONE;
        if (target && (!fits_rows(*target, *whole, rows_of(whole->shape[0], own_rank)) || overlap({*whole, *target})))
            Py_RETURN_NONE;
        head.dtype = static_cast<std::uint8_t>(whole->dtype);
        head.num_dims = static_cast<std::uint8_t>(whole->shape.size());
        std::array<std::int64_t, most_dims> shape{};
        std::ranges::copy(whole->shape, shape.begin());
        head.shape = shape;
    } else if (!tensor.is_none()) {
        Py_RETURN_NONE;
    }
    const Rest rest(*path);
    Payloads payloads;
    const std::string_view own(reinterpret_cast<const char*>(&head), is_root ? head.num_bytes() : scatter_call_bytes);
    const std::string_view elements = whole ? few_elements(*whole) : std::string_view();
    if (!share_payloads(*path, "scatter", own, elements, payloads)) return nullptr;
    const auto found = scatter_in(payloads, root);
    if (!found) return as_list(payloads);
    const auto all_sizes = found->shape;  // aligned
    const std::span<const std::int64_t> shape(all_sizes.data(), found->num_dims);
    const std::size_t own_rows = rows_of(shape[0], own_rank);
    const std::string_view sent = payloads[static_cast<std::size_t>(root)];
    const bool have_come = sent.size() > found->num_bytes() || has_no_elements(shape);
    nb::object result = nb::borrow(out);
    if (out.is_none())
        result = is_root ? out_or_new(out, tensor, Shape::rows, own_rows) : new_tensor(found->dtype, shape, own_rows);
    if (!result.is_valid()) return have_come ? nullptr : fail_after_share(*path, "scatter");
    const auto part = view_tensor(result.ptr());
    const TensorView described{.data = nullptr, .count = 0, .dtype = static_cast<DType>(found->dtype), .shape = shape};
    if (!part || !fits_rows(*part, described, own_rows)) return as_list(payloads);
    std::vector<std::size_t> counts(ranks);
    for (std::size_t r = 0; r < ranks; ++r) counts[r] = rows_of(shape[0], r) * row_elements(shape);
    if (have_come) {
        copy_part(part->data, sent.substr(found->num_bytes()), counts, own_rank, size_of(part->dtype));
        return mark_written(result.ptr()) ? result.release().ptr() : nullptr;
    }
    const std::byte* const source = whole ? whole->data : nullptr;
    const std::size_t most = std::max(part->count, whole ? whole->count : 0) * size_of(part->dtype);
    return move_elements(rest.path(), "scatter", is_root ? tensor : nb::handle(nb::none()), result, most, counts,
                         "root", root, [&](Context& context, const Deadline& deadline) {
                             scatter(context, part->data, source, counts, part->dtype, root, deadline);
                         });
}

}  // namespace

PyMethodDef sized_functions[] = {
    fast_method<fast_all_gather_uneven>("fast_all_gather_uneven"),
    fast_method<fast_gather>("fast_gather"),
    fast_method<fast_scatter>("fast_scatter"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace ferrodist
