// Argument checks and waiting, shared by the fast paths of point-to-point messages.
//
// A fast path takes only plain arguments. Anything else yields `nullopt`, and the call goes to the general path in
// Python, which checks it and raises all errors.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "bindings/gil_release.h"
#include "engine/p2p_engine.h"

namespace ferrodist {

// Larger messages are copied without the GIL, so that other Python threads run.
inline constexpr std::size_t small_bytes = 16 * 1024;

inline std::optional<std::uint64_t> plain_uint(nanobind::handle object) {
    if (!PyLong_CheckExact(object.ptr())) return std::nullopt;
    const unsigned long long value = PyLong_AsUnsignedLongLong(object.ptr());
    if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
        PyErr_Clear();
        return std::nullopt;
    }
    return value;
}

// Another rank of a group, or `any_source` if `may_be_any`.
inline std::optional<int> peer_in(nanobind::handle object, int own_rank, int num_ranks, bool may_be_any) {
    if (!PyLong_CheckExact(object.ptr())) return std::nullopt;
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(object.ptr(), &overflow);
    if (overflow != 0 || value == own_rank || value >= num_ranks) return std::nullopt;
    if (value < 0 && !(may_be_any && value == any_source)) return std::nullopt;
    return static_cast<int>(value);
}

inline std::optional<double> seconds_of(nanobind::handle object) {
    double value = -1.0;
    if (PyFloat_CheckExact(object.ptr())) {
        value = PyFloat_AS_DOUBLE(object.ptr());
    } else if (PyLong_CheckExact(object.ptr())) {
        value = PyLong_AsDouble(object.ptr());
        PyErr_Clear();
    }
    return value >= 0.0 ? std::optional(value) : std::nullopt;
}

// Waits for a transfer on the stack; it has ended when this returns or throws. Once `should_stop()`, which is asked
// several times a second if given, it is cancelled.
template <class SomeTransfer>
void await(P2PEngine& engine, SomeTransfer& transfer, double timeout, const std::function<bool()>& should_stop = {}) {
    constexpr double between_questions = 0.1;  // seconds
    const GilRelease released;
    try {
        bool is_stopped = false;
        for (; should_stop && !is_stopped && timeout > between_questions; timeout -= between_questions) {
            if (engine.wait(transfer, between_questions)) return;
            is_stopped = should_stop();
        }
        if (is_stopped || !engine.wait(transfer, timeout)) engine.cancel(transfer);
    } catch (...) {
        engine.cancel(transfer);
        throw;
    }
}

}  // namespace ferrodist
