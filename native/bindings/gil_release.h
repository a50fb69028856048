// Release of the GIL while a Python thread is in the engine.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "base/interruption.h"

namespace ferrodist {

// Releases the GIL, and lets Python's signal handlers interrupt a wait.
//
// Releasing and reacquiring takes 40 ns, of the 800 of a small collective. A call that finds its condition at the first
// poll can do without: with `when_waiting` the GIL is kept until a wait begins, if nothing else takes long.
class GilRelease final : public Interpreter {
public:
    enum class When { at_once, when_waiting };

    explicit GilRelease(When when = When::at_once) : outer_(std::exchange(interpreter, this)) {
        if (when == When::at_once) release();
    }
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;
    ~GilRelease() {
        interpreter = outer_;  // a signal handler may run inside another wait
        if (state_ != nullptr) PyEval_RestoreThread(state_);
    }

private:
    void release() override {
        if (state_ == nullptr) state_ = PyEval_SaveThread();
    }
    void check_signals() override {
        const nanobind::gil_scoped_acquire guard;
        if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    }

    Interpreter* outer_;
    PyThreadState* state_ = nullptr;
};

}  // namespace ferrodist
