// Tiny tensors as the payloads of calls, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

void bind_eager_tensors(nanobind::module_& m);

}  // namespace ferrodist
