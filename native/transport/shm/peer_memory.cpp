#include "transport/shm/peer_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <string>

#include "base/failure.h"

namespace ferrodist::shm {

namespace {

// The system copies at most this many bytes a call; rounded to pages.
constexpr std::size_t most_at_once = std::size_t{1} << 30;

// Returns 0, or the errno of what can't be read.
int read_from(std::int64_t process, std::byte* out, std::uint64_t address, std::size_t size) {
    std::size_t done = 0;
    while (done < size) {
        const std::size_t wanted = std::min(size - done, most_at_once);
        const iovec local{out + done, wanted};
        const iovec remote{reinterpret_cast<void*>(address + done), wanted};
        const ssize_t count = ::process_vm_readv(static_cast<pid_t>(process), &local, 1, &remote, 1, 0);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        if (count == 0) return EFAULT;
        done += static_cast<std::size_t>(count);
    }
    return 0;
}

}  // namespace

PeerMemory::PeerMemory(int num_ranks)
    : nonce_(std::make_unique<std::uint64_t>()), processes_(static_cast<std::size_t>(num_ranks), 0) {
    std::random_device random;
    *nonce_ = std::uint64_t{random()} << 32 | random();
}

PeerMemory::Card PeerMemory::card() const {
    return {.process = ::getpid(), .address = reinterpret_cast<std::uintptr_t>(nonce_.get()), .nonce = *nonce_};
}

bool PeerMemory::meet(int rank, const Card& card) {
    processes_[static_cast<std::size_t>(rank)] = card.process;
    std::uint64_t found = ~card.nonce;
    return read_from(card.process, reinterpret_cast<std::byte*>(&found), card.address, sizeof found) == 0 &&
           found == card.nonce;
}

void PeerMemory::read(int rank, std::byte* out, std::uint64_t address, std::size_t size) const {
    const std::int32_t error = read_from(processes_[static_cast<std::size_t>(rank)], out, address, size);
    if (error == ESRCH) throw Failure(FailureKind::lost, {rank});
    if (error != 0)
        throw Failure(FailureKind::unreadable, {rank}, std::string(reinterpret_cast<const char*>(&error), sizeof error));
}

}  // namespace ferrodist::shm
