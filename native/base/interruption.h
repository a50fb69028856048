// What a long wait looks at from time to time beside its own matters: signals that arrived for the interpreter.
#pragma once

#include <chrono>

namespace ferrodist {

inline constexpr auto interruption_period = std::chrono::milliseconds(50);

// Whether this thread may be interrupted: set by the bindings while they run a collective for a thread of the
// interpreter's. May throw.
inline thread_local void (*interruption)() = nullptr;

inline void look_for_interruption() {
    if (interruption != nullptr) interruption();
}

}  // namespace ferrodist
