#include "bindings/tensor_bytes.h"

#include <nanobind/stl/optional.h>

#include <cstddef>
#include <optional>
#include <utility>

#include "bindings/tensor.h"

namespace ferrodist {

namespace nb = nanobind;

using namespace nanobind::literals;

namespace {

// The memory of a contiguous tensor, which it keeps alive: `tensor` is an alias, for the user's own may be given other
// memory. Only resizing the storage frees it.
struct TensorBytes {
    nb::object tensor;
    std::byte* data;
    std::size_t size;
};

int get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
    const TensorBytes& bytes = *nb::inst_ptr<TensorBytes>(self);
    return PyBuffer_FillInfo(buffer, self, bytes.data, static_cast<Py_ssize_t>(bytes.size), 0, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

void bind_tensor_bytes(nb::module_& m) {
    nb::class_<TensorBytes>(m, "TensorBytes", nb::type_slots(buffer_slots),
                            "The memory of a tensor, as a writable buffer that keeps it alive.");
    m.def(
        "view_bytes",
        [](nb::handle tensor) -> std::optional<TensorBytes> {
            const auto view = view_data(tensor.ptr());
            if (!view || view->count == 0) return std::nullopt;
            nb::object alias = nb::steal(alias_of(tensor.ptr()));
            if (!alias.is_valid()) throw nb::python_error();
            return TensorBytes{std::move(alias), view->data, view->count * size_of(view->dtype)};
        },
        "tensor"_a, "The memory of a tensor; None unless it is plain, and has elements.");
}

}  // namespace ferrodist
