// A prepared collective: its arguments and the general path of its calls, called from Python without a Python frame.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

void bind_prepared(nanobind::module_& m);

}  // namespace ferrodist
