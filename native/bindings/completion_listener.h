// Who is told of the ends of transfers: what `Transfer::owner` points to.
#pragma once

#include "engine/transfer.h"

namespace ferrodist {

// Called with the interpreter and without the messenger's lock.
class CompletionListener {
public:
    CompletionListener() = default;
    CompletionListener(const CompletionListener&) = delete;
    CompletionListener& operator=(const CompletionListener&) = delete;

    // A transfer of its has ended, and is its own again. Ends are told in their order by each thread; there may be several.
    virtual void hear(Transfer& ended) = 0;
    // The thread has told all that it has for now. This may be the last call.
    virtual void act() = 0;

protected:
    virtual ~CompletionListener() = default;
};

}  // namespace ferrodist
