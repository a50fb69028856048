// The Python bindings of the fast path of point-to-point tensors.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

void bind_tensor_p2p(nanobind::module_& m);

}  // namespace ferrodist
