// What the handler of an interruption raises while the main thread does work for others.
//
// [Note: interruptions]
// Handlers of the system's signals run in the main thread, wherever it is in Python: also while it tells others of what
// has come, which must not end with that. So what they raise is kept until no such work is left, and raised then in what
// the thread was at.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

class SignalCheck {
public:
    // In its life a thread does such work, maybe within another such life.
    class Working {
    public:
        Working() noexcept;
        Working(const Working&) = delete;
        Working& operator=(const Working&) = delete;
        ~Working();
    };
};

// Has what a callback has raised be raised later in the main thread, if it is the one. Nobody can raise it in another: it
// is reported then.
void raise_later(nanobind::python_error& error, nanobind::handle function);

}  // namespace ferrodist
