#include "bindings/fast_objects.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/shared_sizes.h"

namespace ferrodist {

namespace {

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
        const nb::object result = is_kept ? nb::borrow(arguments[0])
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

PyMethodDef object_functions[] = {
    fast_method<fast_gather_object>("fast_gather_object"),
    fast_method<fast_object_from_root>("fast_object_from_root"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace ferrodist
