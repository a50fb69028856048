// The messenger as a part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

void bind_messages(nanobind::module_& m);

}  // namespace ferrodist
