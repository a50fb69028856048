// What the interpreter does while a thread of its own is in the engine.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "base/interruption.h"

namespace ferrodist {

// Frees the interpreter for other threads, and lets signals that it handles end a wait.
//
// To free it and to get it back takes 40 ns, of the 800 that a small collective takes in all. Whoever finds what it waits
// for at the first look can do without: so it is kept until a wait begins (`when_waiting`), if nothing else takes long.
class GilRelease final : public Interpreter {
public:
    enum class When { at_once, when_waiting };

    explicit GilRelease(When when = When::at_once) : outer_(std::exchange(interpreter, this)) {
        if (when == When::at_once) let_go();
    }
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;
    ~GilRelease() {
        interpreter = outer_;  // a signal's handler may run inside of another wait
        if (state_ != nullptr) PyEval_RestoreThread(state_);
    }

private:
    void let_go() override {
        if (state_ == nullptr) state_ = PyEval_SaveThread();
    }
    void look_for_signals() override {
        const nanobind::gil_scoped_acquire held;
        if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    }

    Interpreter* outer_;
    PyThreadState* state_ = nullptr;
};

}  // namespace ferrodist
