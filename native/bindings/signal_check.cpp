#include "bindings/signal_check.h"

#include <utility>

namespace nb = nanobind;

namespace ferrodist {

namespace {

// Thread-local; only the main thread ever defers an exception.
thread_local int depth = 0;
thread_local PyObject* deferred = nullptr;

bool is_main_thread() {
    const nb::object threading = nb::module_::import_("threading");
    return threading.attr("current_thread")().is(threading.attr("main_thread")());
}

// Called by Python in the main thread, between two bytecodes.
int raise(void* error) {
    auto* object = static_cast<PyObject*>(error);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(object)), object);
    Py_DECREF(object);
    return -1;
}

}  // namespace

SignalCheck::Working::Working() noexcept {
    ++depth;
}

SignalCheck::Working::~Working() {
    if (--depth != 0 || deferred == nullptr) return;
    PyObject* error = std::exchange(deferred, nullptr);
    if (Py_AddPendingCall(&raise, error) == 0) return;
    Py_DECREF(error);  // the queue of pending calls is full: so the thread is interrupted by another one
}

void raise_later(nb::python_error& error, nb::handle function) {
    const nb::object value = nb::borrow(error.value());
    if (depth == 0 || deferred != nullptr || !is_main_thread()) {
        error.discard_as_unraisable(function);
        return;
    }
    deferred = nb::object(value).release().ptr();
}

}  // namespace ferrodist
