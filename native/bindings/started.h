// Started collectives, as Python holds them.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <memory>
#include <utility>

#include "bindings/gil_release.h"
#include "engine/communicator.h"

namespace ferrodist {

namespace nb = nanobind;

// A started collective, with the tensors whose addresses the engine has. If it is destroyed before the collective has
// ended, the engine retains them. All of this runs with the GIL, but for the wait itself: nothing can come in between.
class Started {
public:
    Started(Communicator& communicator, nb::handle tensor, nb::handle out)
        : communicator_(communicator), self_(nb::find(communicator)), tensors_{nb::borrow(tensor), nb::borrow(out)} {}
    Started(const Started&) = delete;
    Started& operator=(const Started&) = delete;
    ~Started() {
        if (!pending_ || pending_->is_done()) return;
        auto* tensors = new std::array<nb::object, 2>(std::move(tensors_));
        communicator_.retain(std::move(pending_), std::shared_ptr<void>(tensors, [](void* object) {
                                 delete static_cast<std::array<nb::object, 2>*>(object);
                             }));
    }

    auto starter(double timeout) {
        return [this, timeout](std::size_t size, auto collective) {
            communicator_.free_retained();
            pending_ = communicator_.start(timeout, size, std::move(collective));
        };
    }
    [[nodiscard]] bool is_started() const noexcept { return pending_ != nullptr; }
    [[nodiscard]] bool is_done() const noexcept { return pending_->is_done(); }
    bool wait(double timeout) {
        if (!pending_->is_done()) {
            const GilRelease released;
            if (!communicator_.wait(*pending_, timeout)) return false;
        }
        communicator_.free_retained();
        const auto unused = std::move(tensors_);  // whoever keeps this object need not keep them
        return pending_->wait(timeout);
    }

private:
    Communicator& communicator_;
    nb::object self_;  // keeps this object alive
    std::array<nb::object, 2> tensors_;
    std::shared_ptr<Pending> pending_;
};

}  // namespace ferrodist
