// Tensors as buffers of bytes, for messages.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

void bind_tensor_bytes(nanobind::module_& m);

}  // namespace ferrodist
