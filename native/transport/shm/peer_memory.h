// Direct reads of other processes' memory on this host (process_vm_readv), where the kernel permits them: an ordinary
// tensor of another rank is copied once, without staging. Containers and security modules often forbid it, and process
// ids may differ between them. So collectives use it only if all ranks have probed it on each other, and messages only
// as long as each read finds the process's nonce.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ferrodist::shm {

// A process that may be read: whoever reads the right one finds `nonce`, a random number, at `address`.
struct ProcessRecord {
    std::int64_t process = 0;
    std::uint64_t address = 0;
    std::uint64_t nonce = 0;

    [[nodiscard]] static ProcessRecord own();
};

// Copies `size` bytes at `address` of a process to `out`. Returns 0, or the errno of the failed read: ESTALE if it is
// another process.
int read_process(const ProcessRecord& process, std::byte* out, std::uint64_t address, std::size_t size);

class PeerMemory {
public:
    explicit PeerMemory(int num_ranks) : processes_(static_cast<std::size_t>(num_ranks), 0) {}

    // Registers another rank's process; returns whether its memory can be read.
    bool probe(int rank, const ProcessRecord& process);

    // Whether all ranks can read each other's memory; agreed by all ranks during setup.
    [[nodiscard]] bool is_usable() const noexcept { return is_usable_; }
    void set_usable(bool is_usable) noexcept { is_usable_ = is_usable; }

    // Copies `size` bytes at `address` of a rank to `out`. Throws Failure{lost} if the rank's process has ended, and
    // Failure{unreadable} if the kernel refuses the read, for instance after the process has changed its user.
    void read(int rank, std::byte* out, std::uint64_t address, std::size_t size) const;

private:
    std::vector<std::int64_t> processes_;  // by rank
    bool is_usable_ = false;
};

}  // namespace ferrodist::shm
