// What ranks share before a collective whose sizes they don't know: heads and few elements, for the fast paths of
// fast_sized.cpp and fast_objects.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/fast_call.h"

namespace ferrodist {

// [Note: shared sizes]
// Such a call is a `share` of what each rank knows, its head, and a collective that moves the elements. Heads are those
// of collectives/all_gather.py, gather.py and objects.py, whose general path does the same. Few elements follow their
// head in the `share`. If all that are needed have come, on which the ranks agree since they see the same payloads, the
// call is done. If the heads differ in what the collective would compare, the ranks go on to it, and it raises.
//
// Where the payloads are not those of plain calls that fit together, a function returns them, as a list of bytes, and
// the general path goes on from there: it raises the errors. It returns None if nothing has happened, and else the
// result.

// What each rank has shared.
class Payloads {
public:
    void add(std::string_view payload) {
        all_.append(payload);
        ends_.push_back(all_.size());
    }
    [[nodiscard]] std::size_t size() const { return ends_.size(); }
    [[nodiscard]] std::string_view operator[](std::size_t r) const {
        const std::size_t start = r == 0 ? 0 : ends_[r - 1];
        return {all_.data() + start, ends_[r] - start};
    }

private:
    std::string all_;
    std::vector<std::size_t> ends_;
};

inline constexpr std::int64_t most_elements = std::int64_t{1} << 47;  // as in collectives/payloads.py

// The time that a call has left.
class Rest {
public:
    explicit Rest(const OpenFastPath& path) : path_(path), timeout_(path.timeout) {
        (void)began_.elapsed_seconds();  // starts its clock
    }
    // Of the path's timeout.
    [[nodiscard]] OpenFastPath path() const {
        OpenFastPath rest = path_;
        rest.timeout = std::max(0.0, timeout_ - began_.elapsed_seconds());
        return rest;
    }

private:
    const OpenFastPath& path_;
    double timeout_;
    Deadline began_{timeout_};
};

// Gives every rank's payload to all; false with a Python error set.
bool share_payloads(const OpenFastPath& path, const char* name, std::string_view head, std::string_view elements,
                    Payloads& shared);
// Ends the group for an exception of Python after the ranks have shared their sizes: a signal handler's, or no memory
// for the result. Returns null.
PyObject* fail_after_share(const OpenFastPath& path, const char* name);

nb::list as_list(const std::vector<std::size_t>& sizes);
// As bytes; null with a Python error set.
PyObject* as_list(const Payloads& payloads);

bool has_no_elements(std::span<const std::int64_t> shape);
// Whether a tensor of this shape has so many bytes; the product of the sizes may be too large for an integer.
bool is_size_of(std::size_t bytes, std::span<const std::int64_t> shape, DType dtype);

// The head of all_gather_uneven and gather, and of those of objects: `_PART` of collectives/all_gather.py.
#pragma pack(push, 1)
struct PartHead {
    std::int64_t size = 0;  // along the dim
    std::int64_t row = 0;   // elements of the other dims
    std::int16_t dim = 0;
    std::int16_t num_dims = 0;
    std::int32_t root = 0;   // -1: none
    std::uint8_t dtype = 0;  // as in `DType`
    std::uint8_t is_on_gpu = 0;

    [[nodiscard]] std::string_view bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
};
#pragma pack(pop)
static_assert(sizeof(PartHead) == 26);

struct Parts {
    std::vector<std::size_t> rows;  // of each rank
    bool have_come = true;          // the elements, which fit together
};

// Every rank's part; nothing unless the ranks' payloads fit together.
std::optional<Parts> parts_in(const Payloads& payloads, const PartHead& own);

}  // namespace ferrodist
