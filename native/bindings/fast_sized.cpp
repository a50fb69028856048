#include "bindings/fast_sized.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/fast_call.h"
#include "bindings/plain_calls.h"

namespace ferrodist {

namespace {

// [Note: shared sizes]
// Such a call is two collectives: a `share` of what each rank knows, and one that moves the elements. The payloads are
// those of collectives/all_gather.py, gather.py and objects.py, whose general path makes the same two calls. Where the
// payloads are not those of plain calls that fit together, a function returns them, as a list of bytes, and the general
// path goes on from there: it raises the errors. It returns None if nothing has happened, and else the result.

using Payloads = std::vector<std::string>;

constexpr std::int64_t most_elements = std::int64_t{1} << 47;  // as in collectives/payloads.py

// The time that a call has left.
class Rest {
public:
    explicit Rest(const OpenFastPath& path) : path_(path), timeout_(path.timeout) {
        (void)began_.elapsed_seconds();  // starts its clock
    }
    // Of the path's timeout.
    [[nodiscard]] OpenFastPath path() const {
        OpenFastPath rest = path_;
        rest.timeout = std::max(0.0, timeout_ - began_.elapsed_seconds());
        return rest;
    }

private:
    const OpenFastPath& path_;
    double timeout_;
    Deadline began_{timeout_};
};

// Gives every rank's payload to all; false with a Python error set.
bool share_payloads(const OpenFastPath& path, const char* name, std::string_view own, Payloads& shared) {
    try {
        run(path, own.size(),
            [&](Context& context, const Deadline& deadline) { shared = share(context, name, own, deadline); });
        return true;
    } catch (...) {
        const nb::object text = nb::steal(PyUnicode_FromString(name));
        raise_for(path, "share", nb::none(), nb::none(), {{"name", text.ptr()}});
        return false;
    }
}

PyObject* as_list(const Payloads& payloads) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(payloads.size()));
    if (list == nullptr) return nullptr;
    for (std::size_t r = 0; r < payloads.size(); ++r) {
        PyObject* bytes = PyBytes_FromStringAndSize(payloads[r].data(), static_cast<Py_ssize_t>(payloads[r].size()));
        if (bytes == nullptr) {
            Py_DECREF(list);
            return nullptr;
        }
        PyList_SET_ITEM(list, static_cast<Py_ssize_t>(r), bytes);
    }
    return list;
}

// The payload of all_gather_uneven and gather: `_SIZE` of collectives/all_gather.py.
struct SizePayload {
    std::int64_t size;  // along the dim
    std::int64_t dim;
    std::int64_t num_dims;
    std::int64_t is_on_gpu;

    [[nodiscard]] std::string_view bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
};
static_assert(sizeof(SizePayload) == 32);

// Every rank's number of rows; empty unless the ranks' payloads fit together.
std::vector<std::size_t> rows_in(const Payloads& payloads, const SizePayload& own) {
    std::vector<std::size_t> rows;
    for (const std::string& payload : payloads) {
        SizePayload theirs;
        if (payload.size() != sizeof theirs) return {};
        std::memcpy(&theirs, payload.data(), sizeof theirs);
        if (theirs.dim != own.dim || theirs.num_dims != own.num_dims || theirs.is_on_gpu != own.is_on_gpu) return {};
        if (theirs.size < 0 || theirs.size > most_elements) return {};
        rows.push_back(static_cast<std::size_t>(theirs.size));
    }
    return rows;
}

// Whether `out` has the shape of `rows` rows of `part`, and the same dtype.
bool fits_rows(const TensorView& out, const TensorView& part, std::size_t rows) {
    return out.dtype == part.dtype && out.shape.size() == part.shape.size() &&
           out.shape[0] == static_cast<std::int64_t>(rows) &&
           std::equal(out.shape.begin() + 1, out.shape.end(), part.shape.begin() + 1);
}

// Ends the group for an exception of Python after the ranks have shared their sizes: a signal handler's, or no memory
// for the result. Returns null.
PyObject* fail_after_share(const OpenFastPath& path, const char* name) {
    const nb::object text = nb::steal(PyUnicode_FromString(name));
    try {
        throw nb::python_error();
    } catch (...) {
        raise_for(path, "share", nb::none(), nb::none(), {{"name", text.ptr()}});
    }
    return nullptr;
}

// Runs the collective that moves the elements; `fact` is for its error.
template <class Collective>
PyObject* move_elements(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::object result,
                        std::size_t size, const std::vector<std::size_t>& counts, const char* fact, int value,
                        const Collective& collective) {
    try {
        run(path, size, collective);
    } catch (...) {
        nb::list elements;
        for (const std::size_t count : counts) elements.append(count);
        const nb::object number = nb::int_(value);
        raise_for(path, operation, tensor, result, {{"counts", elements.ptr()}, {fact, number.ptr()}});
        return nullptr;
    }
    return mark_written(result.ptr()) ? result.release().ptr() : nullptr;
}

// all_gather_uneven, and gather to `root`; -1 is none. `rows_found` gets the rows of each rank, if there is a result.
PyObject* concatenate(const OpenFastPath& path, const char* name, nb::handle tensor, nb::handle out, int root,
                      std::vector<std::size_t>* rows_found = nullptr) {
    const bool has_result = root < 0 || root == path.communicator->rank();
    const auto part = view_tensor(tensor.ptr());
    if (!part || part->shape.empty()) Py_RETURN_NONE;
    if (!out.is_none()) {  // what the general path refuses before ranks share their sizes
        const auto target = view_tensor(out.ptr());
        if (!has_result || !target || target->dtype != part->dtype) Py_RETURN_NONE;
    }
    const Rest rest(path);
    const SizePayload own{part->shape[0], 0, static_cast<std::int64_t>(part->shape.size()), 0};
    Payloads payloads;
    if (!share_payloads(path, name, own.bytes(), payloads)) return nullptr;
    const std::vector<std::size_t> rows = rows_in(payloads, own);
    if (rows.empty()) return as_list(payloads);
    if (rows_found != nullptr) *rows_found = rows;
    const std::size_t total = std::accumulate(rows.begin(), rows.end(), std::size_t{0});
    const nb::object result = result_of(out, tensor, has_result ? Shape::rows : Shape::nothing, total);
    if (!result.is_valid()) return fail_after_share(path, name);
    const auto pair = view_pair(tensor, result);
    if (!pair || (has_result && (!fits_rows(pair->out, pair->source, total) || overlap(*pair))))
        return as_list(payloads);
    std::vector<std::size_t> counts = rows;
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

// The payload of a scatter: `_SCATTER_CALL` of collectives/gather.py, and on the root `_SCATTER_HEAD`.
constexpr std::size_t most_dims = 12;

#pragma pack(push, 1)
struct ScatterHead {
    std::int32_t dim = 0;
    std::int32_t root = 0;
    std::uint8_t dtype = 0;  // as in `DType`
    std::uint8_t records_history = 0;
    std::uint8_t is_on_gpu = 0;
    std::uint8_t num_dims = 0;
    std::array<std::int64_t, most_dims> shape = {};
};
#pragma pack(pop)
static_assert(sizeof(ScatterHead) == 108);
constexpr std::size_t scatter_call_bytes = 8;  // of the head: what every rank sends

// The root's head, if all ranks' payloads are those of plain calls with dim 0 that fit together.
std::optional<ScatterHead> scatter_in(const Payloads& payloads, int root) {
    for (std::size_t r = 0; r < payloads.size(); ++r) {
        const bool is_root = r == static_cast<std::size_t>(root);
        if (payloads[r].size() != (is_root ? sizeof(ScatterHead) : scatter_call_bytes)) return std::nullopt;
        std::array<std::int32_t, 2> call;
        std::memcpy(&call, payloads[r].data(), sizeof call);
        if (call[0] != 0 || call[1] != root) return std::nullopt;
    }
    ScatterHead head;
    std::memcpy(&head, payloads[static_cast<std::size_t>(root)].data(), sizeof head);
    if (head.num_dims < 1 || head.num_dims > most_dims || head.dtype >= num_dtypes) return std::nullopt;
    if (head.records_history != 0 || head.is_on_gpu != 0) return std::nullopt;
    const auto shape = head.shape;  // aligned
    if (!std::ranges::all_of(shape, [](std::int64_t size) { return size >= 0 && size <= most_elements; }))
        return std::nullopt;
    return head;
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
    const std::string_view own(reinterpret_cast<const char*>(&head), is_root ? sizeof head : scatter_call_bytes);
    if (!share_payloads(*path, "scatter", own, payloads)) return nullptr;
    const auto found = scatter_in(payloads, root);
    if (!found) return as_list(payloads);
    const auto all_sizes = found->shape;  // aligned
    const std::span<const std::int64_t> shape(all_sizes.data(), found->num_dims);
    const std::size_t own_rows = rows_of(shape[0], own_rank);
    nb::object result = nb::borrow(out);
    if (out.is_none())
        result = is_root ? result_of(out, tensor, Shape::rows, own_rows) : new_tensor(found->dtype, shape, own_rows);
    if (!result.is_valid()) return fail_after_share(*path, "scatter");
    const auto part = view_tensor(result.ptr());
    const TensorView described{.data = nullptr, .count = 0, .dtype = static_cast<DType>(found->dtype), .shape = shape};
    if (!part || !fits_rows(*part, described, own_rows)) return as_list(payloads);
    std::vector<std::size_t> counts(ranks);
    for (std::size_t r = 0; r < ranks; ++r) counts[r] = rows_of(shape[0], r) * row_elements(shape);
    const std::byte* const source = whole ? whole->data : nullptr;
    const std::size_t most = std::max(part->count, whole ? whole->count : 0) * size_of(part->dtype);
    return move_elements(rest.path(), "scatter", is_root ? tensor : nb::handle(nb::none()), result, most, counts,
                         "root", root, [&](Context& context, const Deadline& deadline) {
                             scatter(context, part->data, source, counts, part->dtype, root, deadline);
                         });
}

// Objects are their encoding, in a tensor of bytes. The result is a tuple of the joined encodings, which are empty on
// ranks without a result, and their sizes.
PyObject* fast_gather_object(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_NONE;
    const auto path = find_fast_path(arguments[2], arguments[3]);
    const bool has_root = arguments[1] != Py_None;
    const int root = index_of(arguments[1]);
    if (!path || (has_root && (root < 0 || root >= path->communicator->num_ranks()))) Py_RETURN_NONE;
    const char* const name = has_root ? "gather_object" : "all_gather_object";
    std::vector<std::size_t> sizes;
    const nb::object joined = nb::steal(concatenate(*path, name, arguments[0], nb::none(), root, &sizes));
    if (!joined.is_valid() || joined.is_none() || nb::isinstance<nb::list>(joined)) return joined.inc_ref().ptr();
    nb::list each;
    for (const std::size_t size : sizes) each.append(size);
    return nb::make_tuple(joined, each).release().ptr();
}

// The root's sizes in the payloads of broadcast_object and scatter_object, `number` of them, if they are those of calls
// that fit together: the root from every rank, and from the root also the sizes. See `_sizes_of_root` in
// collectives/objects.py.
std::vector<std::size_t> root_sizes_in(const Payloads& payloads, std::int32_t root, std::size_t number) {
    std::vector<std::int64_t> sizes(number);
    const std::string& sent = payloads[static_cast<std::size_t>(root)];
    if (sent.size() != sizeof root + number * sizeof sizes[0]) return {};
    for (const std::string& payload : payloads)
        if (payload.size() < sizeof root || std::memcmp(payload.data(), &root, sizeof root) != 0) return {};
    std::memcpy(sizes.data(), sent.data() + sizeof root, number * sizeof sizes[0]);
    if (!std::ranges::all_of(sizes, [](std::int64_t size) { return size >= 0 && size <= most_elements; })) return {};
    return {sizes.begin(), sizes.end()};
}

// broadcast_object, or scatter_object with a size for each rank. The root passes a tensor of bytes and the sizes of the
// objects in it; the others None and as many sizes, which are not read. The result is a tensor of bytes: this rank's
// object.
PyObject* fast_object_from_root(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const nb::handle encoded = arguments[0];
    const bool is_scatter = arguments[2] == Py_True;
    const auto path = find_fast_path(arguments[4], arguments[5]);
    const std::int32_t root = index_of(arguments[3]);
    if (!path || root < 0 || root >= path->communicator->num_ranks()) Py_RETURN_NONE;
    const int own_rank = path->communicator->rank();
    const bool is_root = own_rank == root;
    const auto whole = is_root ? view_tensor(encoded.ptr()) : std::nullopt;
    if (is_root && !whole) Py_RETURN_NONE;
    const std::byte* const source = whole ? whole->data : nullptr;
    const std::size_t source_bytes = whole ? whole->count : 0;
    std::vector<std::int64_t> sizes;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[1]); ++i)
        sizes.push_back(PyLong_AsLongLong(PyList_GET_ITEM(arguments[1], i)));
    std::string own(reinterpret_cast<const char*>(&root), sizeof root);
    if (is_root) own.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof sizes[0]);
    const char* const name = is_scatter ? "scatter_object" : "broadcast_object";
    const Rest rest(*path);
    Payloads payloads;
    if (!share_payloads(*path, name, own, payloads)) return nullptr;
    const std::vector<std::size_t> counts = root_sizes_in(payloads, root, sizes.size());
    if (counts.empty()) return as_list(payloads);
    const std::size_t size = counts[is_scatter ? static_cast<std::size_t>(own_rank) : 0];
    const std::array<std::int64_t, 1> shape = {static_cast<std::int64_t>(size)};
    const nb::object result =
        is_root && !is_scatter ? nb::borrow(encoded) : new_tensor(static_cast<std::uint8_t>(DType::uint8), shape, size);
    if (!result.is_valid()) return fail_after_share(*path, name);
    const auto view = view_tensor(result.ptr());
    if (!view) return as_list(payloads);
    const auto move = [&](const char* operation, const auto& collective) {
        return move_elements(rest.path(), operation, is_root ? encoded : result, result,
                             std::max(view->count, source_bytes), counts, "root", root, collective);
    };
    if (!is_scatter)
        return move("broadcast", [&](Context& context, const Deadline& deadline) {
            broadcast(context, view->data, view->data, view->count, DType::uint8, root, deadline);
        });
    return move("scatter", [&](Context& context, const Deadline& deadline) {
        scatter(context, view->data, source, counts, DType::uint8, root, deadline);
    });
}

}  // namespace

PyMethodDef sized_functions[] = {
    fast_method<fast_all_gather_uneven>("fast_all_gather_uneven"),
    fast_method<fast_gather>("fast_gather"),
    fast_method<fast_scatter>("fast_scatter"),
    fast_method<fast_gather_object>("fast_gather_object"),
    fast_method<fast_object_from_root>("fast_object_from_root"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace ferrodist
