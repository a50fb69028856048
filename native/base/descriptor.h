// A file descriptor that is closed by its owner.
#pragma once

#include <unistd.h>

#include <utility>

namespace ferrodist {

class Descriptor {
public:
    Descriptor() = default;
    explicit Descriptor(int number) : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        if (this != &other) {
            if (number_ >= 0) ::close(number_);
            number_ = std::exchange(other.number_, -1);
        }
        return *this;
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (number_ >= 0) ::close(number_);
    }

    [[nodiscard]] int get() const noexcept { return number_; }
    // Gives the descriptor up to the caller.
    [[nodiscard]] int release() noexcept { return std::exchange(number_, -1); }

private:
    int number_ = -1;
};

}  // namespace ferrodist
