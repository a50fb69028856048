// Why an operation of the engine ended early. Everything that blocks throws this, or what a signal's handler raised in
// Python (base/interruption.h); `bindings/` hands it to Python, where `backends/native/errors.py` turns it into the
// public errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace ferrodist {

enum class FailureKind : int {
    late,        // a deadline passed; `ranks` have not called the collective
    stalled,     // a deadline passed; `ranks` have called it and got stuck
    left,        // `ranks` have left the group and will not come
    mismatch,    // the ranks called different things; `record` holds every rank's call
    sizes,       // `ranks` sends another number of elements than this one expects; `record` is both, as uint64
    aborted,     // the group was ended on all ranks; `record` says why, in the words of who ended it
    stopped,     // this rank has left the group
    broken,      // an operation before this one failed on this rank
    queue,       // an operation started before this one has not ended in time
    unsupported, // the engine can't do it
    lost,        // the connection to `ranks` has ended
    protocol,    // `ranks` sent what no rank would send; `record` says what
    failed,      // a collective has failed on `ranks`, which tell why another way
    unreadable,  // the system has refused to read the memory of `ranks`, as it did before; `record` is the errno, as int32
};

class Failure : public std::exception {
public:
    Failure(FailureKind kind, std::vector<int> ranks, std::string record = {})
        : kind_(kind), ranks_(std::move(ranks)), record_(std::move(record)) {}

    [[nodiscard]] const char* what() const noexcept override { return "an operation of the ferrodist engine failed"; }
    [[nodiscard]] FailureKind kind() const noexcept { return kind_; }
    [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }
    [[nodiscard]] const std::string& record() const noexcept { return record_; }

    // Which of the group's collectives it was, and the seconds that it had taken.
    [[nodiscard]] std::uint64_t place() const noexcept { return place_; }
    [[nodiscard]] double elapsed() const noexcept { return elapsed_; }
    void set_context(std::uint64_t place, double elapsed) noexcept {
        place_ = place;
        elapsed_ = elapsed;
    }

private:
    FailureKind kind_;
    std::vector<int> ranks_;
    std::string record_;
    std::uint64_t place_ = 0;
    double elapsed_ = 0.0;
};

}  // namespace ferrodist
