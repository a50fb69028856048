// The interface for owners of transfers that are notified of their ends; `Transfer::owner` points to it.
#pragma once

#include "engine/transfer.h"

namespace ferrodist {

// Called with the GIL and without the engine's lock.
class CompletionListener {
public:
    CompletionListener() = default;
    CompletionListener(const CompletionListener&) = delete;
    CompletionListener& operator=(const CompletionListener&) = delete;

    // A transfer has ended and belongs to its owner again. Each thread reports ends in order; there may be several
    // threads.
    virtual void on_end(Transfer& ended) = 0;
    // The thread has reported all ends that it has for now. This may be the last call.
    virtual void flush() = 0;

protected:
    virtual ~CompletionListener() = default;
};

}  // namespace ferrodist
