// What a wait owes the interpreter whose thread it runs in: to let others run meanwhile, and to look for signals.
#pragma once

#include <chrono>

namespace ferrodist {

inline constexpr auto interruption_period = std::chrono::milliseconds(50);

// The interpreter, while it has its thread run something here.
class Interpreter {
public:
    // Before anything that may take longer than a microsecond: its other threads may run from now on.
    virtual void let_go() = 0;
    // From time to time in a long wait, after `let_go`: signals that arrived are handled. May throw.
    virtual void look_for_signals() = 0;

protected:
    ~Interpreter() = default;
};

// Of this thread; none where the interpreter has no part in what it does.
inline thread_local Interpreter* interpreter = nullptr;

inline void expect_wait() {
    if (interpreter != nullptr) interpreter->let_go();
}

inline void look_for_interruption() {
    if (interpreter != nullptr) interpreter->look_for_signals();
}

}  // namespace ferrodist
