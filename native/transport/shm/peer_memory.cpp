#include "transport/shm/peer_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <random>
#include <string>

#include "base/failure.h"

namespace ferrodist::shm {

namespace {

// The maximum number of bytes per system call; the kernel's limit, rounded to pages.
constexpr std::size_t max_call_bytes = std::size_t{1} << 30;

std::uint64_t random_number() {
    std::random_device random;
    return std::uint64_t{random()} << 32 | random();
}

iovec remote(std::uint64_t address, std::size_t size) {
    return {reinterpret_cast<void*>(address), size};
}

// Returns 0, or the errno of the failed read.
int read_from(std::int64_t process, std::byte* out, std::uint64_t address, std::size_t size) {
    std::size_t done = 0;
    while (done < size) {
        const std::size_t wanted = std::min(size - done, max_call_bytes);
        const iovec to{out + done, wanted};
        const iovec from = remote(address + done, wanted);
        const ssize_t count = ::process_vm_readv(static_cast<pid_t>(process), &to, 1, &from, 1, 0);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        if (count == 0) return EFAULT;
        done += static_cast<std::size_t>(count);
    }
    return 0;
}

}  // namespace

ProcessRecord ProcessRecord::own() {
    static const std::uint64_t nonce = random_number();
    return {.process = ::getpid(), .address = reinterpret_cast<std::uintptr_t>(&nonce), .nonce = nonce};
}

// The nonce is read by the same system call, of the same process therefore, even if the id has just gone to a new one.
int read_process(const ProcessRecord& process, std::byte* out, std::uint64_t address, std::size_t size) {
    std::uint64_t nonce = ~process.nonce;
    const std::array<iovec, 2> to{iovec{out, size}, iovec{&nonce, sizeof nonce}};
    const std::array<iovec, 2> from{remote(address, size), remote(process.address, sizeof nonce)};
    ssize_t count = -1;
    do {
        count =
            ::process_vm_readv(static_cast<pid_t>(process.process), to.data(), to.size(), from.data(), from.size(), 0);
    } while (count < 0 && errno == EINTR);
    if (count < 0) return errno;
    if (static_cast<std::size_t>(count) != size + sizeof nonce) return EFAULT;
    return nonce == process.nonce ? 0 : ESTALE;
}

bool PeerMemory::probe(int rank, const ProcessRecord& process) {
    processes_[static_cast<std::size_t>(rank)] = process.process;
    return read_process(process, nullptr, process.address, 0) == 0;
}

void PeerMemory::read(int rank, std::byte* out, std::uint64_t address, std::size_t size) const {
    const std::int32_t error = read_from(processes_[static_cast<std::size_t>(rank)], out, address, size);
    if (error == ESRCH) throw Failure(FailureKind::lost, {rank});
    if (error != 0)
        throw Failure(FailureKind::unreadable, {rank},
                      std::string(reinterpret_cast<const char*>(&error), sizeof error));
}

}  // namespace ferrodist::shm
