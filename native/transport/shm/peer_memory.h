// Reading the memory of other processes of this host (process_vm_readv), where the system lets ranks do it: what lies in
// an ordinary tensor of another rank comes in one copy, without staging. Containers and security modules often forbid it,
// and process numbers may differ between them, so it is used only where all ranks have tried it on each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ferrodist::shm {

class PeerMemory {
public:
    // What a rank shows the others, which find `nonce` at `address` of `process` if they can read it.
    struct Card {
        std::int64_t process = 0;
        std::uint64_t address = 0;
        std::uint64_t nonce = 0;
    };

    explicit PeerMemory(int num_ranks);

    [[nodiscard]] Card card() const;
    // Takes in another rank's card; whether its memory can be read.
    bool meet(int rank, const Card& card);

    // Whether all ranks can read each other's, which they have told each other.
    [[nodiscard]] bool is_usable() const noexcept { return is_usable_; }
    void set_usable(bool is_usable) noexcept { is_usable_ = is_usable; }

    // Copies `size` bytes at `address` of a rank to `out`. Throws Failure{lost} when the rank's process has ended, and
    // Failure{unreadable} when the system refuses it, as where the process has changed its user since it was met.
    void read(int rank, std::byte* out, std::uint64_t address, std::size_t size) const;

private:
    std::unique_ptr<std::uint64_t> nonce_;
    std::vector<std::int64_t> processes_;  // by rank
    bool is_usable_ = false;
};

}  // namespace ferrodist::shm
