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

namespace ferrodist {

namespace {

// [Note: shared sizes]
// Such a call is a `share` of what each rank knows, its head, and a collective that moves the elements. Heads are those
// of collectives/all_gather.py, gather.py and objects.py, whose general path does the same. Few elements follow their
// head in the `share`. If all that are needed have come, on which the ranks agree since they see the same payloads, the
// call is done. If the heads differ in what the collective would compare, the ranks go on to it, and it raises.
//
// Where the payloads are not those of plain calls that fit together, a function returns them, as a list of bytes, and
// the general path goes on from there: it raises the errors. It returns None if nothing has happened, and else the
// result.

// What each rank has shared.
class Payloads {
public:
    void add(std::string_view payload) {
        all_.append(payload);
        ends_.push_back(all_.size());
    }
    [[nodiscard]] std::size_t size() const { return ends_.size(); }
    [[nodiscard]] std::string_view operator[](std::size_t r) const {
        const std::size_t start = r == 0 ? 0 : ends_[r - 1];
        return {all_.data() + start, ends_[r] - start};
    }

private:
    std::string all_;
    std::vector<std::size_t> ends_;
};

// Elements of so many bytes follow their head. With two ranks on two processors a second meeting took 0.4 us. A gather
// of 1 KiB won 0.3 us by one meeting and one of 4 KiB lost 0.5, for elements are copied once more; a scatter of 1 KiB
// lost 0.4, for every rank reads all of them.
constexpr std::size_t few_bytes = 512;

std::string_view few_elements(const TensorView& tensor) {
    const std::size_t size = tensor.count * size_of(tensor.dtype);
    return size <= few_bytes ? std::string_view(reinterpret_cast<const char*>(tensor.data), size) : std::string_view();
}

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
bool share_payloads(const OpenFastPath& path, const char* name, std::string_view head, std::string_view elements,
                    Payloads& shared) {
    try {
        run_collective(path, head.size() + elements.size(), [&](Context& context, const Deadline& deadline) {
            share(context, name, head, elements, [&](std::string_view payload) { shared.add(payload); }, deadline);
        });
        return true;
    } catch (...) {
        const nb::object text = nb::steal(PyUnicode_FromString(name));
        raise_for(path, "share", nb::none(), nb::none(), {{"name", text.ptr()}});
        return false;
    }
}

nb::list as_list(const std::vector<std::size_t>& sizes) {
    nb::list list;
    for (const std::size_t size : sizes) list.append(size);
    return list;
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

void copy_text(std::byte* out, std::string_view bytes) {
    copy_bytes(out, reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
}

bool has_no_elements(std::span<const std::int64_t> shape) {
    return std::ranges::find(shape, 0) != shape.end();
}

// Whether a tensor of this shape has so many bytes; the product of the sizes may be too large for an integer.
bool is_size_of(std::size_t bytes, std::span<const std::int64_t> shape, DType dtype) {
    if (has_no_elements(shape)) return bytes == 0;
    if (bytes % size_of(dtype) != 0) return false;
    std::size_t left = bytes / size_of(dtype);
    for (const std::int64_t size : shape) {
        if (left % static_cast<std::size_t>(size) != 0) return false;
        left /= static_cast<std::size_t>(size);
    }
    return left == 1;
}

// The head of all_gather_uneven and gather: `_PART` of collectives/all_gather.py.
#pragma pack(push, 1)
struct PartHead {
    std::int64_t size = 0;  // along the dim
    std::int64_t row = 0;   // elements of the other dims
    std::int16_t dim = 0;
    std::int16_t num_dims = 0;
    std::int32_t root = 0;   // -1: none
    std::uint8_t dtype = 0;  // as in `DType`
    std::uint8_t is_on_gpu = 0;

    [[nodiscard]] std::string_view bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
};
#pragma pack(pop)
static_assert(sizeof(PartHead) == 26);

struct Parts {
    std::vector<std::size_t> rows;  // of each rank
    bool have_come = true;          // the elements, which fit together
};

// Every rank's part; nothing unless the ranks' payloads fit together.
std::optional<Parts> parts_in(const Payloads& payloads, const PartHead& own) {
    Parts parts;
    parts.rows.reserve(payloads.size());
    for (std::size_t r = 0; r < payloads.size(); ++r) {
        const std::string_view payload = payloads[r];
        PartHead theirs;
        if (payload.size() < sizeof theirs) return std::nullopt;
        std::memcpy(&theirs, payload.data(), sizeof theirs);
        if (theirs.dim != own.dim || theirs.num_dims != own.num_dims || theirs.is_on_gpu != own.is_on_gpu)
            return std::nullopt;
        const std::int64_t size = theirs.size, row = theirs.row;
        if (size < 0 || size > most_elements || row < 0 || row > most_elements || theirs.dtype >= num_dtypes)
            return std::nullopt;
        parts.rows.push_back(static_cast<std::size_t>(size));
        const std::size_t come = payload.size() - sizeof theirs;
        const std::array<std::int64_t, 2> shape = {size, row};
        if (come != 0 && !is_size_of(come, shape, static_cast<DType>(theirs.dtype))) return std::nullopt;
        const bool is_alike = theirs.dtype == own.dtype && row == own.row && theirs.root == own.root;
        parts.have_come = parts.have_come && is_alike && (come != 0 || size == 0 || row == 0);
    }
    return parts;
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

// Objects come as their encoding, a bytearray that nobody else has, and leave as objects that have bytes.

std::optional<std::string_view> view_object(nb::handle encoded) {
    if (!PyByteArray_CheckExact(encoded.ptr()) || !is_plain_here()) return std::nullopt;
    return std::string_view(PyByteArray_AS_STRING(encoded.ptr()),
                            static_cast<std::size_t>(PyByteArray_GET_SIZE(encoded.ptr())));
}

nb::object as_bytes(std::string_view object) {
    return nb::steal(PyBytes_FromStringAndSize(object.data(), static_cast<Py_ssize_t>(object.size())));
}

nb::object new_bytes(std::size_t size) {
    return nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
}

std::byte* data_of(const nb::object& bytes) {
    return reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr()));
}

// Runs the collective that moves the bytes of objects; false with a Python error set.
template <class Collective>
bool move_objects(const OpenFastPath& path, const char* operation, const std::vector<std::size_t>& sizes,
                  const char* fact, int value, const Collective& collective) {
    try {
        run_collective(path, std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}), collective);
        return true;
    } catch (...) {
        const std::array<std::int64_t, 1> shape = {0};
        const nb::object like = new_tensor(static_cast<std::uint8_t>(DType::uint8), shape, 0);
        const nb::list counts = as_list(sizes);
        const nb::object number = nb::int_(value);
        raise_for(path, operation, like, like, {{"counts", counts.ptr()}, {fact, number.ptr()}});
        return false;
    }
}

// The parts of joined objects, as a tuple of views.
PyObject* split_objects(const nb::object& joined, const std::vector<std::size_t>& sizes) {
    const nb::object view = nb::steal(PyMemoryView_FromObject(joined.ptr()));
    const nb::object results = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(sizes.size())));
    if (!view.is_valid() || !results.is_valid()) return nullptr;
    Py_ssize_t start = 0;
    for (std::size_t r = 0; r < sizes.size(); ++r) {
        const Py_ssize_t end = start + static_cast<Py_ssize_t>(sizes[r]);
        PyObject* part = PySequence_GetSlice(view.ptr(), start, end);
        if (part == nullptr) return nullptr;
        PyTuple_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(r), part);
        start = end;
    }
    return results.inc_ref().ptr();
}

// all_gather_object, and gather_object to a root that is not None. The result is a tuple of all encodings, which is
// empty on ranks without a result.
PyObject* fast_gather_object(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_NONE;
    const auto object = view_object(arguments[0]);
    const auto path = find_fast_path(arguments[2], arguments[3]);
    const bool has_root = arguments[1] != Py_None;
    const int root = index_of(arguments[1]);
    if (!object || !path || (has_root && (root < 0 || root >= path->communicator->num_ranks()))) Py_RETURN_NONE;
    const PartHead own{.size = static_cast<std::int64_t>(object->size()),
                       .row = 1,
                       .num_dims = 1,
                       .root = root,
                       .dtype = static_cast<std::uint8_t>(DType::uint8)};
    const char* const name = has_root ? "gather_object" : "all_gather_object";
    const Rest rest(*path);
    Payloads payloads;
    if (!share_payloads(*path, name, own.bytes(), *object, payloads)) return nullptr;
    const auto parts = parts_in(payloads, own);
    if (!parts) return as_list(payloads);
    const bool has_result = !has_root || root == path->communicator->rank();
    if (!parts->have_come) {
        const std::vector<std::size_t>& sizes = parts->rows;
        const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
        const nb::object joined = new_bytes(has_result ? total : 0);
        if (!joined.is_valid()) return fail_after_share(*path, name);
        std::byte* const out = has_result ? data_of(joined) : nullptr;
        const auto* source = reinterpret_cast<const std::byte*>(object->data());
        const auto join = [&](Context& context, const Deadline& deadline) {
            if (has_root)
                gather(context, out, source, sizes, DType::uint8, root, deadline);
            else
                all_gather(context, out, source, sizes, DType::uint8, 0, deadline);
        };
        if (!move_objects(rest.path(), has_root ? "gather" : "all_gather", sizes, has_root ? "root" : "dim",
                          has_root ? root : 0, join))
            return nullptr;
        return split_objects(joined, has_result ? sizes : std::vector<std::size_t>());
    }
    const std::size_t num_results = has_result ? payloads.size() : 0;
    const nb::object results = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(num_results)));
    if (!results.is_valid()) return nullptr;
    for (std::size_t r = 0; r < num_results; ++r) {
        nb::object each = as_bytes(payloads[r].substr(sizeof own));
        if (!each.is_valid()) return nullptr;
        PyTuple_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(r), each.release().ptr());
    }
    return results.inc_ref().ptr();
}

// The root's sizes in the payloads of broadcast_object and scatter_object, `number` of them, if they are those of calls
// that fit together: the root from every rank, and from the root also the sizes, and then the objects if they are few
// bytes. See `_sizes_of_root` in collectives/objects.py.
std::vector<std::size_t> root_sizes_in(const Payloads& payloads, std::int32_t root, std::size_t number) {
    std::vector<std::int64_t> sizes(number);
    const std::string_view sent = payloads[static_cast<std::size_t>(root)];
    const std::size_t head_bytes = sizeof root + number * sizeof sizes[0];
    if (sent.size() < head_bytes) return {};
    for (std::size_t r = 0; r < payloads.size(); ++r)
        if (payloads[r].size() < sizeof root || std::memcmp(payloads[r].data(), &root, sizeof root) != 0) return {};
    std::memcpy(sizes.data(), sent.data() + sizeof root, number * sizeof sizes[0]);
    if (!std::ranges::all_of(sizes, [](std::int64_t size) { return size >= 0 && size <= most_elements; })) return {};
    const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
    if (sent.size() != head_bytes && sent.size() != head_bytes + total) return {};
    return {sizes.begin(), sizes.end()};
}

// broadcast_object, or scatter_object with a size for each rank. The root passes the objects' joined encodings and
// their sizes; the others None and as many sizes, which are not read. The result is the encoding of this rank's object.
PyObject* fast_object_from_root(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const bool is_scatter = arguments[2] == Py_True;
    const auto path = find_fast_path(arguments[4], arguments[5]);
    const std::int32_t root = index_of(arguments[3]);
    if (!path || root < 0 || root >= path->communicator->num_ranks() || !is_plain_here()) Py_RETURN_NONE;
    const int own_rank = path->communicator->rank();
    const bool is_root = own_rank == root;
    const auto objects = is_root ? view_object(arguments[0]) : std::string_view();
    if (!objects) Py_RETURN_NONE;
    const auto num_sizes = static_cast<std::size_t>(PyList_GET_SIZE(arguments[1]));
    std::string own(reinterpret_cast<const char*>(&root), sizeof root);
    for (std::size_t i = 0; is_root && i < num_sizes; ++i) {
        const std::int64_t size = PyLong_AsLongLong(PyList_GET_ITEM(arguments[1], static_cast<Py_ssize_t>(i)));
        own.append(reinterpret_cast<const char*>(&size), sizeof size);
    }
    const char* const name = is_scatter ? "scatter_object" : "broadcast_object";
    const Rest rest(*path);
    Payloads payloads;
    if (!share_payloads(*path, name, own, *objects, payloads)) return nullptr;
    const std::vector<std::size_t> sizes = root_sizes_in(payloads, root, num_sizes);
    const std::string_view sent = payloads[static_cast<std::size_t>(root)];
    const std::size_t head_bytes = sizeof root + num_sizes * sizeof(std::int64_t);
    if (sizes.empty()) return as_list(payloads);
    const std::size_t part = is_scatter ? static_cast<std::size_t>(own_rank) : 0;
    if (sent.size() == head_bytes) {
        const bool is_kept = is_root && !is_scatter;  // the root's own, of a broadcast
        const std::array<std::int64_t, 1> shape = {static_cast<std::int64_t>(sizes[part])};
        const nb::object result =
            is_kept ? nb::borrow(arguments[0])
                    : new_tensor(static_cast<std::uint8_t>(DType::uint8), shape, sizes[part]);
        if (!result.is_valid()) return fail_after_share(*path, name);
        const auto view = is_kept ? std::nullopt : view_tensor(result.ptr());
        if (!is_kept && !view) return as_list(payloads);
        std::byte* const out = is_kept ? reinterpret_cast<std::byte*>(PyByteArray_AS_STRING(result.ptr())) : view->data;
        const auto* source = reinterpret_cast<const std::byte*>(objects->data());
        const auto move = [&](Context& context, const Deadline& deadline) {
            if (is_scatter)
                scatter(context, out, source, sizes, DType::uint8, root, deadline);
            else
                broadcast(context, out, out, sizes[0], DType::uint8, root, deadline);
        };
        if (!move_objects(rest.path(), is_scatter ? "scatter" : "broadcast", sizes, "root", root, move)) return nullptr;
        return result.inc_ref().ptr();
    }
    const auto before = std::span(sizes).first(part);
    const std::size_t start = std::accumulate(before.begin(), before.end(), head_bytes);
    return as_bytes(sent.substr(start, sizes[part])).release().ptr();
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
