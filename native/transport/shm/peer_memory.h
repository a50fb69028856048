// Direct reads of other processes' memory on this host (process_vm_readv), where the kernel permits them: an ordinary
// tensor of another rank is copied once, without staging. Containers and security modules often forbid it, and process
// ids may differ between them, so it is used only if all ranks have probed it on each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ferrodist::shm {

class PeerMemory {
public:
    // A rank's probe: a peer that can read its memory finds `nonce` at `address` of `process`.
    struct ProbeRecord {
        std::int64_t process = 0;
        std::uint64_t address = 0;
        std::uint64_t nonce = 0;
    };

    explicit PeerMemory(int num_ranks);

    [[nodiscard]] ProbeRecord probe_record() const;
    // Registers another rank's probe record; returns whether its memory can be read.
    bool probe(int rank, const ProbeRecord& probe_record);

    // Whether all ranks can read each other's memory; agreed by all ranks during setup.
    [[nodiscard]] bool is_usable() const noexcept { return is_usable_; }
    void set_usable(bool is_usable) noexcept { is_usable_ = is_usable; }

    // Copies `size` bytes at `address` of a rank to `out`. Throws Failure{lost} if the rank's process has ended, and
    // Failure{unreadable} if the kernel refuses the read, for instance after the process has changed its user.
    void read(int rank, std::byte* out, std::uint64_t address, std::size_t size) const;

private:
    std::unique_ptr<std::uint64_t> nonce_;
    std::vector<std::int64_t> processes_;  // by rank
    bool is_usable_ = false;
};

}  // namespace ferrodist::shm
