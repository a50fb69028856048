#include "transport/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/interruption.h"

namespace ferrodist::shm {

namespace {

[[noreturn]] void fail(int error, const char* call) {
    throw std::system_error(error, std::generic_category(), call);
}

// A signal makes the kernel undo one call's whole allocation, so a call allocates no more than fits between the ticks
// of a fast timer: a quarter of a millisecond's worth.
constexpr off_t taken_at_once = off_t{2} << 20;

}  // namespace

Mapping::Mapping(int descriptor, std::size_t size) : size_(size) {
    void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) fail(errno, "mmap of shared memory");
    data_ = static_cast<std::byte*>(address);
}

Mapping::~Mapping() {
    if (data_ != nullptr) ::munmap(data_, size_);
}

Descriptor create_memory(const char* name, std::size_t size) {
    if (!std::in_range<off_t>(size)) fail(EFBIG, "size of shared memory");
    Descriptor memory(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (memory.get() < 0) fail(errno, "memfd_create");
    if (::ftruncate(memory.get(), static_cast<off_t>(size)) != 0) fail(errno, "ftruncate of shared memory");
    if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) fail(errno, "sealing shared memory");
    return memory;
}

void take_pages(int descriptor, const Part& part) {
    auto next_look = std::chrono::steady_clock::now() + interruption_period;
    const auto end = static_cast<off_t>(part.start + part.size);
    for (auto start = static_cast<off_t>(part.start); start < end;) {
        const off_t wanted = std::min(end - start, taken_at_once);
        const int error = ::posix_fallocate(descriptor, start, wanted);
        if (error == 0) {
            start += wanted;
        } else if (error != EINTR) {
            fail(error, "taking the pages of shared memory");
        }
        if (const auto now = std::chrono::steady_clock::now(); now >= next_look) {
            check_interruption();
            next_look = now + interruption_period;
        }
    }
}

}  // namespace ferrodist::shm
