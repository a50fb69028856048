// Cooperation of waits with the interpreter that called them: other Python threads run meanwhile, and signals are
// handled.
#pragma once

#include <chrono>

namespace ferrodist {

inline constexpr auto interruption_period = std::chrono::milliseconds(50);

// The interpreter, during a call from one of its threads into the engine.
class Interpreter {
public:
    // Lets the interpreter's other threads run from now on. Called before anything that may take longer than a
    // microsecond.
    virtual void release() = 0;
    // Runs the handlers of signals that have arrived. Called periodically in a long wait, after `release`. May throw.
    virtual void check_signals() = 0;

protected:
    ~Interpreter() = default;
};

// The interpreter that this thread came from; null for threads of the engine itself.
inline thread_local Interpreter* interpreter = nullptr;

inline void release_interpreter() {
    if (interpreter != nullptr) interpreter->release();
}

inline void check_interruption() {
    if (interpreter != nullptr) interpreter->check_signals();
}

}  // namespace ferrodist
