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

// The maximum number of bytes per system call; the kernel's limit, rounded to pages.
constexpr std::size_t max_call_bytes = std::size_t{1} << 30;

// Returns 0, or the errno of the failed read.
int read_from(std::int64_t process, std::byte* out, std::uint64_t address, std::size_t size) {
    std::size_t done = 0;
    while (done < size) {
        const std::size_t wanted = std::min(size - done, max_call_bytes);
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

PeerMemory::ProbeRecord PeerMemory::probe_record() const {
    return {.process = ::getpid(), .address = reinterpret_cast<std::uintptr_t>(nonce_.get()), .nonce = *nonce_};
}

bool PeerMemory::probe(int rank, const ProbeRecord& probe_record) {
    processes_[static_cast<std::size_t>(rank)] = probe_record.process;
    std::uint64_t found = ~probe_record.nonce;
    return read_from(probe_record.process, reinterpret_cast<std::byte*>(&found), probe_record.address, sizeof found) ==
               0 &&
           found == probe_record.nonce;
}

void PeerMemory::read(int rank, std::byte* out, std::uint64_t address, std::size_t size) const {
    const std::int32_t error = read_from(processes_[static_cast<std::size_t>(rank)], out, address, size);
    if (error == ESRCH) throw Failure(FailureKind::lost, {rank});
    if (error != 0)
        throw Failure(FailureKind::unreadable, {rank},
                      std::string(reinterpret_cast<const char*>(&error), sizeof error));
}

}  // namespace ferrodist::shm
