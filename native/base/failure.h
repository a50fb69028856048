// The exception of the engine: why an operation ended early. Everything that blocks throws this, or the exception that
// a Python signal handler raised (base/interruption.h). `bindings/` translates it to Python, where
// `backends/native/errors.py` makes the public errors of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace ferrodist {

enum class FailureKind : int {
    late,         // the deadline passed; `ranks` have not called the collective
    stalled,      // the deadline passed; `ranks` have called the collective and are stuck in it
    left,         // `ranks` have left the group
    mismatch,     // the ranks made different calls; `record` holds every rank's call
    sizes,        // the number of elements from `ranks` differs from the expected one; `record` is both, as uint64
    aborted,      // the group was aborted on all ranks; `record` is the reason given to `abort`
    stopped,      // this rank has left the group
    broken,       // an earlier operation failed on this rank
    queue,        // an operation started earlier has not ended in time
    unsupported,  // the engine does not support the operation
    lost,         // the connection to `ranks` has ended
    protocol,     // `ranks` violated the protocol; `record` says how
    failed,       // a collective has failed on `ranks`, which report the reason over the control plane
    unreadable,   // the kernel now refuses to read the memory of `ranks`; `record` is the errno, as int32
};

class Failure : public std::exception {
public:
    Failure(FailureKind kind, std::vector<int> ranks, std::string record = {})
        : kind_(kind), ranks_(std::move(ranks)), record_(std::move(record)) {}

    [[nodiscard]] const char* what() const noexcept override { return "an operation of the ferrodist engine failed"; }
    [[nodiscard]] FailureKind kind() const noexcept { return kind_; }
    [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }
    [[nodiscard]] const std::string& record() const noexcept { return record_; }

    // The collective's ticket in its group, and the seconds since it was called.
    [[nodiscard]] std::uint64_t ticket() const noexcept { return ticket_; }
    [[nodiscard]] double elapsed() const noexcept { return elapsed_; }
    void set_context(std::uint64_t ticket, double elapsed) noexcept {
        ticket_ = ticket;
        elapsed_ = elapsed;
    }

private:
    FailureKind kind_;
    std::vector<int> ranks_;
    std::string record_;
    std::uint64_t ticket_ = 0;
    double elapsed_ = 0.0;
};

}  // namespace ferrodist
