// What C++ throws, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

// Makes the module's exception types, and has nanobind raise them for what its functions throw.
void bind_failures(nanobind::module_& m);

// The Python exception for what is being handled: to be called in a `catch (...)`.
nanobind::object current_python_exception();

}  // namespace ferrodist
