// What the interpreter does while a thread of its own waits in the engine.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "base/interruption.h"

namespace ferrodist {

// Frees the interpreter for other threads, and lets signals that it handles end a wait.
class Released {
public:
    Released() : outer_(std::exchange(interruption, check_signals)) {}
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;
    ~Released() { interruption = outer_; }  // a signal's handler may run inside of another wait

private:
    static void check_signals() {
        const nanobind::gil_scoped_acquire held;
        if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    }

    void (*outer_)();
    nanobind::gil_scoped_release released_;
};

}  // namespace ferrodist
