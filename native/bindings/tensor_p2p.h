// The short way of tensors from rank to rank, as a part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

void bind_tensor_messages(nanobind::module_& m);

}  // namespace ferrodist
