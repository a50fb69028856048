// A look into torch's tensors without linking torch: the DLPack exchange interface, a table of C functions that torch
// publishes since 2.10 (https://github.com/dmlc/dlpack, version 1.3). Where it is missing, callers take the long way.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "kernels/element.h"

namespace ferrodist {

// A contiguous tensor in the memory of this host; it holds as long as the tensor does.
struct TensorView {
    std::byte* data;
    std::size_t count;
    DType dtype;
    std::span<const std::int64_t> shape;
};

// Finds the interface of torch.Tensor; false when it has none. `parameter_type` is a subclass that may be looked into
// like it; others may have their elements elsewhere. `increment_version` is torch's function of that name.
bool load_tensor_interface(PyObject* tensor_type, PyObject* parameter_type, PyObject* increment_version);

// The view of a tensor, or nothing when the short way is not for it: it is no plain tensor, requires grad, is not
// contiguous or not on the CPU, has no memory (inside of a functorch transform), or has a type that collectives don't
// carry; or it is negated lazily, or may carry a tangent of forward-mode differentiation, or be traced (make_fx); or there
// is no interface.
std::optional<TensorView> view_tensor(PyObject* tensor);
// The view of ``tensor.data``: it may require grad, and autograd is not told of what is written.
std::optional<TensorView> view_data(PyObject* tensor);
// Of the two tensors of a call, which may be the same one.
std::optional<std::pair<TensorView, TensorView>> view_tensors(PyObject* tensor, PyObject* other);

// Tells autograd that a tensor has changed: something may have saved it for a backward. False with a Python error set.
bool mark_written(PyObject* tensor);

}  // namespace ferrodist
