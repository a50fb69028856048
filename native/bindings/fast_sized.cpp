#include "bindings/fast_sized.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
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

std::string_view few_elements(const std::byte* data, std::size_t size) {
    return size <= few_bytes ? std::string_view(reinterpret_cast<const char*>(data), size) : std::string_view();
}

void copy_text(std::byte* out, std::string_view bytes) {
    copy_bytes(out, reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
}

// The dim along which parts are joined or divided. In the whole tensor they alternate: each has a run of elements for
// every index of the dims before it.
struct JoinedDim {
    static constexpr std::size_t most_copied_bytes = std::size_t{4} << 20;

    std::size_t dim;
    std::size_t size;      // of the tensor, along it
    std::size_t row;       // elements of all other dims
    std::size_t num_runs;  // elements of the dims before it

    friend bool operator==(const JoinedDim&, const JoinedDim&) = default;

    // Nothing if `dim`, of which a negative one counts from the end, is not a dim of the shape.
    static std::optional<JoinedDim> of(std::span<const std::int64_t> shape, nb::handle dim) {
        const auto num_dims = static_cast<std::int64_t>(shape.size());
        const std::optional<std::int64_t> given = integer_of(dim);
        if (!given || *given < -num_dims || *given >= num_dims) return std::nullopt;
        return at(shape, static_cast<std::size_t>(*given < 0 ? *given + num_dims : *given));
    }
    static JoinedDim at(std::span<const std::int64_t> shape, std::size_t dim) {
        const std::size_t num_runs = num_elements(shape.first(dim));
        return {.dim = dim,
                .size = static_cast<std::size_t>(shape[dim]),
                .row = num_runs * num_elements(shape.subspan(dim + 1)),
                .num_runs = num_runs};
    }

    // Whether a tensor is still like the one that this was made for.
    [[nodiscard]] bool is_of(const TensorView& tensor) const {
        return dim < tensor.shape.size() && at(tensor.shape, dim) == *this;
    }

    // The elements of parts that have so many rows.
    [[nodiscard]] std::vector<std::size_t> counts(std::span<const std::size_t> rows) const {
        std::vector<std::size_t> found(rows.begin(), rows.end());
        for (std::size_t& count : found) count *= row;
        return found;
    }
    // Whether `out` has the dtype of `part`, and its shape but for the size of the dim.
    [[nodiscard]] bool fits(const TensorView& out, const TensorView& part, std::size_t size_of_out) const {
        if (out.dtype != part.dtype || out.shape.size() != part.shape.size()) return false;
        for (std::size_t each = 0; each < part.shape.size(); ++each) {
            const auto size = each == dim ? static_cast<std::int64_t>(size_of_out) : part.shape[each];
            if (out.shape[each] != size) return false;
        }
        return true;
    }
    // Whether a whole tensor of so many bytes is left to the general path, which copies large ones faster.
    [[nodiscard]] bool is_large(std::size_t size) const { return num_runs != 1 && size > most_copied_bytes; }
    // Calls `copy(in_whole, in_parts, size)` for each run, with its offsets in bytes in the whole tensor and in parts
    // of so many elements that lie one after the other.
    template <class Copy>
    void for_runs(std::span<const std::size_t> counts, std::size_t element_size, const Copy& copy) const {
        if (std::ranges::count(counts, std::size_t{0}) == std::ssize(counts))
            return;  // there may be any number of runs
        std::size_t in_whole = 0;
        for (std::size_t run = 0; run < num_runs; ++run) {
            std::size_t start = 0;
            for (const std::size_t count : counts) {
                const std::size_t size = count / num_runs * element_size;
                copy(in_whole, start + run * size, size);
                in_whole += size;
                start += count * element_size;
            }
        }
    }
    void join(std::byte* whole, const std::byte* parts, std::span<const std::size_t> counts,
              std::size_t element_size) const {
        for_runs(counts, element_size, [&](std::size_t in_whole, std::size_t in_parts, std::size_t size) {
            copy_bytes(whole + in_whole, parts + in_parts, size);
        });
    }
    void divide(std::byte* parts, const std::byte* whole, std::span<const std::size_t> counts,
                std::size_t element_size) const {
        for_runs(counts, element_size, [&](std::size_t in_whole, std::size_t in_parts, std::size_t size) {
            copy_bytes(parts + in_parts, whole + in_whole, size);
        });
    }
};

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
void concatenate_payloads(std::byte* out, const Payloads& payloads) {
    for (std::size_t r = 0; r < payloads.size(); ++r) {
        const std::string_view elements = payloads[r].substr(sizeof(PartHead));
        copy_text(out, elements);
        out += elements.size();
    }
}

// Has `write(parts)` write a tensor's parts one after the other, of `counts` elements, and joins them to `out`. A null
// `out` is passed on.
template <class Write>
void write_joined(const JoinedDim& along, const TensorView* out, std::span<const std::size_t> counts,
                  const Write& write) {
    if (out == nullptr || along.num_runs == 1) return write(out == nullptr ? nullptr : out->data);
    const std::size_t element_size = size_of(out->dtype);
    const auto parts = std::make_unique_for_overwrite<std::byte[]>(out->count * element_size);
    write(parts.get());
    along.join(out->data, parts.get(), counts, element_size);
}

// all_gather_uneven, and gather to `root`; -1 is none.
PyObject* concatenate(const OpenFastPath& path, const char* name, nb::handle tensor, nb::handle dim, nb::handle out,
                      int root) {
    const bool has_result = root < 0 || root == path.communicator->rank();
    const auto part = view_tensor(tensor.ptr());
    const auto along = part ? JoinedDim::of(part->shape, dim) : std::nullopt;
    if (!along) Py_RETURN_NONE;
    if (!out.is_none()) {  // what the general path refuses before ranks share their sizes
        const auto target = view_tensor(out.ptr());
        if (!has_result || !target || target->dtype != part->dtype) Py_RETURN_NONE;
    }
    const Rest rest(path);
    const std::size_t part_bytes = part->count * size_of(part->dtype);
    const PartHead own{.size = static_cast<std::int64_t>(along->size),
                       .row = static_cast<std::int64_t>(along->row),
                       .dim = static_cast<std::int16_t>(along->dim),
                       .num_dims = static_cast<std::int16_t>(part->shape.size()),
                       .root = root,
                       .dtype = static_cast<std::uint8_t>(part->dtype)};
    Payloads payloads;
    if (!share_payloads(path, name, own.bytes(), few_elements(part->data, part_bytes), payloads)) return nullptr;
    const auto parts = parts_in(payloads, own);
    if (!parts) return as_list(payloads);
    const std::size_t total = std::accumulate(parts->rows.begin(), parts->rows.end(), std::size_t{0});
    const nb::object result = out_or_new(out, tensor, has_result ? Shape::rows : Shape::nothing, total, along->dim);
    if (!result.is_valid()) return parts->have_come ? nullptr : fail_after_share(path, name);
    const auto pair = view_pair(tensor, result);
    if (!pair || (has_result && !along->fits(pair->out, pair->source, total))) return as_list(payloads);
    if (!along->is_of(pair->source) || static_cast<std::uint8_t>(pair->source.dtype) != own.dtype)
        return as_list(payloads);  // another thread has changed the tensor
    const TensorView* const target = has_result ? &pair->out : nullptr;
    if (target != nullptr && along->is_large(target->count * size_of(target->dtype))) return as_list(payloads);
    const std::vector<std::size_t> counts = along->counts(parts->rows);
    if (parts->have_come) {
        if (has_result)
            write_joined(*along, target, counts, [&](std::byte* joined) { concatenate_payloads(joined, payloads); });
        return mark_written(result.ptr()) ? result.inc_ref().ptr() : nullptr;
    }
    if (has_result && overlap(*pair)) return as_list(payloads);
    const auto move = [&](const char* operation, const char* fact, int value, const auto& collective) {
        return move_elements(rest.path(), operation, tensor, result, size_of_pair(*pair), counts, fact, value,
                             [&](Context& context, const Deadline& deadline) {
                                 write_joined(*along, target, counts,
                                              [&](std::byte* joined) { collective(context, joined, deadline); });
                             });
    };
    const auto along_dim = static_cast<int>(along->dim);
    if (root < 0)
        return move("all_gather", "dim", along_dim, [&](Context& context, std::byte* joined, const Deadline& deadline) {
            all_gather(context, joined, pair->source.data, counts, pair->source.dtype, along_dim, deadline);
        });
    return move("gather", "root", root, [&](Context& context, std::byte* joined, const Deadline& deadline) {
        gather(context, joined, pair->source.data, counts, pair->source.dtype, root, deadline);
    });
}

PyObject* fast_all_gather_uneven(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const auto path = find_fast_path(arguments[2], arguments[4]);
    if (!path) Py_RETURN_NONE;
    return concatenate(*path, "all_gather_uneven", arguments[0], arguments[1], arguments[3], -1);
}

PyObject* fast_gather(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const auto path = find_fast_path(arguments[3], arguments[5]);
    const int root = index_of(arguments[1]);
    if (!path || root < 0 || root >= path->communicator->num_ranks()) Py_RETURN_NONE;
    return concatenate(*path, "gather", arguments[0], arguments[2], arguments[4], root);
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

// The root's head, if all ranks' payloads are those of plain calls that fit together.
std::optional<ScatterHead> scatter_in(const Payloads& payloads, int root) {
    ScatterHead head;
    const std::string_view sent = payloads[static_cast<std::size_t>(root)];
    std::memcpy(&head, sent.data(), std::min(sizeof head, sent.size()));
    if (head.num_dims < 1 || head.num_dims > most_dims || head.dtype >= num_dtypes || head.flags != 0)
        return std::nullopt;
    if (sent.size() < head.num_bytes()) return std::nullopt;
    if (head.dim < 0 || head.dim >= head.num_dims || head.root != root) return std::nullopt;
    for (std::size_t r = 0; r < payloads.size(); ++r) {
        if (r == static_cast<std::size_t>(root)) continue;
        if (payloads[r].size() != scatter_call_bytes) return std::nullopt;
        std::array<std::int32_t, 2> call;
        std::memcpy(&call, payloads[r].data(), sizeof call);
        if (call[0] != head.dim && call[0] != head.dim - head.num_dims) return std::nullopt;
        if (call[1] != root) return std::nullopt;
    }
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

// The elements of a whole tensor, part after part; valid as long as the tensor.
struct DividedElements {
    std::unique_ptr<std::byte[]> copy;
    const std::byte* data = nullptr;

    DividedElements(const TensorView& whole, const JoinedDim& along, std::span<const std::size_t> counts)
        : data(whole.data) {
        if (along.num_runs == 1) return;
        copy = std::make_unique_for_overwrite<std::byte[]>(whole.count * size_of(whole.dtype));
        along.divide(copy.get(), whole.data, counts, size_of(whole.dtype));
        data = copy.get();
    }
};

// The rows of each rank's part, as `compute_shard_sizes` divides them.
std::vector<std::size_t> divided_rows(std::size_t total, std::size_t ranks) {
    std::vector<std::size_t> rows(ranks);
    for (std::size_t r = 0; r < ranks; ++r) rows[r] = (total + ranks - 1 - r) / ranks;
    return rows;
}

PyObject* fast_scatter(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], dim = arguments[2], out = arguments[4];
    const auto path = find_fast_path(arguments[3], arguments[5]);
    const int root = index_of(arguments[1]);
    if (!path || root < 0 || root >= path->communicator->num_ranks()) Py_RETURN_NONE;
    const std::size_t ranks = path->num_ranks();
    const auto own_rank = static_cast<std::size_t>(path->communicator->rank());
    const bool is_root = own_rank == static_cast<std::size_t>(root);
    const auto target = out.is_none() ? std::nullopt : view_tensor(out.ptr());
    if (!out.is_none() && !target) Py_RETURN_NONE;
    ScatterHead head;
    head.root = root;
    std::optional<DividedElements> elements;
    std::size_t whole_bytes = 0;
    if (is_root) {
        const auto whole = view_tensor(tensor.ptr());
        const auto along = whole ? JoinedDim::of(whole->shape, dim) : std::nullopt;
        if (!along || whole->shape.size() > most_dims) Py_RETURN_NONE;
        const std::vector<std::size_t> rows = divided_rows(along->size, ranks);
        if (target && (!along->fits(*target, *whole, rows[own_rank]) || overlap({*whole, *target}))) Py_RETURN_NONE;
        head.dim = static_cast<std::int32_t>(along->dim);
        head.dtype = static_cast<std::uint8_t>(whole->dtype);
        head.num_dims = static_cast<std::uint8_t>(whole->shape.size());
        std::array<std::int64_t, most_dims> shape{};
        std::ranges::copy(whole->shape, shape.begin());
        head.shape = shape;
        whole_bytes = whole->count * size_of(whole->dtype);
        if (along->is_large(whole_bytes)) Py_RETURN_NONE;
        elements.emplace(*whole, *along, along->counts(rows));
    } else {
        const auto given = integer_of(dim);
        constexpr auto most = static_cast<std::int64_t>(most_dims);
        if (!tensor.is_none() || !given || *given < -most || *given >= most) Py_RETURN_NONE;
        head.dim = static_cast<std::int32_t>(*given);
    }
    const Rest rest(*path);
    Payloads payloads;
    const std::string_view own(reinterpret_cast<const char*>(&head), is_root ? head.num_bytes() : scatter_call_bytes);
    const std::string_view few = elements ? few_elements(elements->data, whole_bytes) : std::string_view();
    if (!share_payloads(*path, "scatter", own, few, payloads)) return nullptr;
    const auto found = scatter_in(payloads, root);
    if (!found) return as_list(payloads);
    const auto all_sizes = found->shape;  // aligned
    const std::span<const std::int64_t> shape(all_sizes.data(), found->num_dims);
    const JoinedDim along = JoinedDim::at(shape, static_cast<std::size_t>(found->dim));
    const std::vector<std::size_t> rows = divided_rows(along.size, ranks);
    const std::string_view sent = payloads[static_cast<std::size_t>(root)];
    const bool have_come = sent.size() > found->num_bytes() || has_no_elements(shape);
    nb::object result = nb::borrow(out);
    if (out.is_none())
        result = is_root ? out_or_new(out, tensor, Shape::rows, rows[own_rank], along.dim)
                         : new_tensor(found->dtype, shape, rows[own_rank], along.dim);
    if (!result.is_valid()) return have_come ? nullptr : fail_after_share(*path, "scatter");
    const auto part = view_tensor(result.ptr());
    const TensorView described{.data = nullptr, .count = 0, .dtype = static_cast<DType>(found->dtype), .shape = shape};
    if (!part || !along.fits(*part, described, rows[own_rank])) return as_list(payloads);
    const std::vector<std::size_t> counts = along.counts(rows);
    if (have_come) {
        copy_part(part->data, sent.substr(found->num_bytes()), counts, own_rank, size_of(part->dtype));
        return mark_written(result.ptr()) ? result.release().ptr() : nullptr;
    }
    const std::byte* source = nullptr;
    if (is_root) {
        const auto whole = view_tensor(tensor.ptr());
        if (!whole || static_cast<std::uint8_t>(whole->dtype) != found->dtype || !along.is_of(*whole))
            return as_list(payloads);  // another thread has changed the tensor
        source = elements->copy ? elements->copy.get() : whole->data;
    }
    const std::size_t most = std::max(part->count * size_of(part->dtype), whole_bytes);
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
