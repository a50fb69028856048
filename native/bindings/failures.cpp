#include "bindings/failures.h"

#include <system_error>

#include "base/failure.h"

namespace nb = nanobind;

namespace ferrodist {

namespace {

PyObject* failure_type = nullptr;

nb::object make(nb::handle type, const nb::tuple& arguments) {
    return nb::steal(PyObject_CallObject(type.ptr(), arguments.ptr()));
}

nb::object to_python(const Failure& failure) {
    nb::list ranks;
    for (const int rank : failure.ranks()) ranks.append(rank);
    const std::string& record = failure.record();
    return make(failure_type,
                nb::make_tuple(static_cast<int>(failure.kind()), nb::tuple(ranks),
                               nb::bytes(record.data(), record.size()), failure.ticket(), failure.elapsed()));
}

nb::object to_python(const std::system_error& error) {
    return make(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()));
}

template <class Error>
void raise(const Error& error) {
    const nb::object exception = to_python(error);
    if (exception.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

}  // namespace

void bind_failures(nb::module_& m) {
    failure_type = nb::exception<Failure>(m, "Failure").release().ptr();
    nb::register_exception_translator([](const std::exception_ptr& caught, void*) {
        try {
            std::rethrow_exception(caught);
        } catch (const Failure& failure) {
            raise(failure);
        } catch (const std::system_error& error) {
            raise(error);
        }
    });
}

nb::object current_python_exception() {
    try {
        throw;
    } catch (nb::python_error& error) {
        return nb::borrow(error.value());
    } catch (const Failure& failure) {
        return to_python(failure);
    } catch (const std::system_error& error) {
        return to_python(error);
    } catch (const std::exception& error) {
        return make(PyExc_RuntimeError, nb::make_tuple(error.what()));
    }
}

}  // namespace ferrodist
