#include "transport/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ferrodist::shm {

namespace {

[[noreturn]] void fail(int error, const char* call) {
    throw std::system_error(error, std::generic_category(), call);
}

}  // namespace

Mapping::Mapping(int descriptor, std::size_t size) : size_(size) {
    void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) fail(errno, "mmap of shared memory");
    data_ = static_cast<std::byte*>(address);
}

Mapping::~Mapping() {
    if (data_ != nullptr) ::munmap(data_, size_);
}

int create_memory(const char* name, std::size_t size) {
    const int descriptor = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor < 0) fail(errno, "memfd_create");
    const auto length = static_cast<off_t>(size);
    int error = 0;
    const char* call = "ftruncate of shared memory";
    if (::ftruncate(descriptor, length) != 0) {
        error = errno;
    } else if ((error = ::posix_fallocate(descriptor, 0, length)) != 0) {
        call = "taking the pages of shared memory";
    } else if (::fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
        error = errno;
        call = "sealing shared memory";
    }
    if (error != 0) {
        ::close(descriptor);
        fail(error, call);
    }
    return descriptor;
}

}  // namespace ferrodist::shm
