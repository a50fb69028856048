#include "bindings/shared_sizes.h"

#include <array>
#include <cstring>

namespace ferrodist {

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

PyObject* fail_after_share(const OpenFastPath& path, const char* name) {
    const nb::object text = nb::steal(PyUnicode_FromString(name));
    try {
        throw nb::python_error();
    } catch (...) {
        raise_for(path, "share", nb::none(), nb::none(), {{"name", text.ptr()}});
    }
    return nullptr;
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

bool has_no_elements(std::span<const std::int64_t> shape) {
    return std::ranges::find(shape, 0) != shape.end();
}

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

}  // namespace ferrodist
