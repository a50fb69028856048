// Translation of C++ exceptions to Python.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

// Creates the module's exception types, and registers their translation with nanobind.
void bind_failures(nanobind::module_& m);

// The Python exception for the exception being handled; call it in a `catch (...)`.
nanobind::object current_python_exception();

}  // namespace ferrodist
