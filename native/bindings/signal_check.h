// Deferred exceptions of signal handlers that run while the main thread calls back into Python for others.
//
// [Note: interruptions]
// Python runs signal handlers in the main thread, wherever it is in Python: also while it dispatches events for others,
// which must not end because of that. So an exception that a handler raises is deferred until the dispatch is over, and
// raised then in the code that the thread was running.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

class SignalCheck {
public:
    // A scope in which a thread dispatches events; scopes may nest.
    class Working {
    public:
        Working() noexcept;
        Working(const Working&) = delete;
        Working& operator=(const Working&) = delete;
        ~Working();
    };
};

// Defers an exception raised by a callback, to be raised later if this is the main thread. In any other thread nothing
// can raise it later: there it is reported as unraisable.
void raise_later(nanobind::python_error& error, nanobind::handle function);

}  // namespace ferrodist
