// Access to torch's tensors without linking torch: the DLPack exchange interface, a table of C functions that torch
// publishes since 2.10 (https://github.com/dmlc/dlpack, version 1.3). Where it is missing, callers use the general
// path.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/element.h"

namespace ferrodist {

// A view of a contiguous tensor in host memory, valid as long as the tensor.
struct TensorView {
    std::byte* data;
    std::size_t count;
    DType dtype;
    std::span<const std::int64_t> shape;
};

// Finds the interface of torch.Tensor; false if it has none. `parameter_type` is a subclass that may be viewed,
// too; other subclasses may store their elements elsewhere. `increment_version` is torch's function of that name.
bool load_tensor_interface(PyObject* tensor_type, PyObject* parameter_type, PyObject* increment_version);

// Whether tensors may be plain in this context: not where they may have forward-mode tangents, or be traced (make_fx).
bool is_plain_here();

// The view of a tensor, or nothing if the fast path does not apply: the tensor is not plain, requires grad, is not
// contiguous or not on the CPU, has no memory (inside a functorch transform), has a dtype that collectives do not
// support, is lazily negated, or may have a forward-mode tangent or be traced (make_fx); or there is no interface.
std::optional<TensorView> view_tensor(PyObject* tensor);
// The view of `tensor.data`: it may require grad, and autograd does not track writes to it.
std::optional<TensorView> view_data(PyObject* tensor);
// The views of the two tensors of a call, which may be the same one.
std::optional<std::pair<TensorView, TensorView>> view_tensors(PyObject* tensor, PyObject* other);

// What a plain tensor was like once, to find out whether it still is, in less time than a view of it takes.
class TensorSnapshot {
public:
    // Nothing if `view_tensor` gives none.
    static std::optional<TensorSnapshot> of(PyObject* tensor);
    // Whether the tensor, which is the same object, has the same memory, sizes and strides, and requires no grad. Where
    // tensors may be plain (`is_plain_here`).
    [[nodiscard]] bool is_of(PyObject* tensor) const;

private:
    const std::byte* data_ = nullptr;
    std::uint32_t type_ = 0;           // DLPack's
    std::vector<std::int64_t> sizes_;  // and strides
    // Whether memory like this can be lazily negated: the imaginary part of a conjugate has gaps, unless it has just one
    // element.
    bool may_be_negated_ = false;
};

// `tensor.data`, which holds the memory also when `tensor` is given another one; null with a Python error set.
PyObject* alias_of(PyObject* tensor);

// Bumps a tensor's version, so that autograd notices the write if it has saved the tensor for a backward. False with a
// Python error set.
bool mark_written(PyObject* tensor);
// The same, given the tensor in a tuple of its own, too.
bool mark_written(PyObject* tensor, PyObject* in_tuple);

}  // namespace ferrodist
