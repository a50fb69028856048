// What the short ways of messages have in common: how they look at arguments, and how they wait.
//
// A short way takes what the long way might have to make an error of as it comes: what is not plain here is "nothing",
// and the long way looks at it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "bindings/gil_release.h"
#include "engine/p2p_engine.h"

namespace ferrodist {

// A larger message is copied without the interpreter, so that its other threads go on.
inline constexpr std::size_t small_bytes = 16 * 1024;

inline std::optional<std::uint64_t> small_number(nanobind::handle object) {
    if (!PyLong_CheckExact(object.ptr())) return std::nullopt;
    const unsigned long long value = PyLong_AsUnsignedLongLong(object.ptr());
    if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
        PyErr_Clear();
        return std::nullopt;
    }
    return value;
}

// Another rank of a group, or `any_source` where that may be.
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

// Waits for a transfer on the stack, which has ended when this returns or throws.
template <class Some>
void await(P2PEngine& messenger, Some& transfer, double timeout) {
    const GilRelease released;
    try {
        if (!messenger.wait(transfer, timeout)) messenger.cancel(transfer);
    } catch (...) {
        messenger.cancel(transfer);
        throw;
    }
}

}  // namespace ferrodist
