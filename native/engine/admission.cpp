#include "engine/admission.h"

namespace ferrodist {

bool Admission::announce(const std::shared_ptr<Message>& message) {
    if (!is_admitted(message->source, message->tag)) return false;
    if (mailbox.arrive(message)) return true;
    add_event(PeerEvent::Kind::full, message->source, message);
    return false;
}

bool Admission::is_admitted(int source, const Tag& tag) const {
    if (is_closed_) return false;
    if (tag.group == 0) return is_world_open_;
    const auto found = groups_.find(tag.group);
    if (found == groups_.end()) return true;
    const Group& group = found->second;
    return !group.has_ended && (group.members.empty() || group.members[static_cast<std::size_t>(source)]);
}

void Admission::open_group(std::uint64_t group, const std::vector<int>& members) {
    Group& opened = groups_[group];
    opened.members.assign(num_ranks_, false);
    for (const int rank : members) opened.members[static_cast<std::size_t>(rank)] = true;
    mailbox.for_each_waiting_message([&](Message& message) {
        if (message.tag.group == group && !is_admitted(message.source, message.tag)) mailbox.drop(message);
    });
}

void Admission::end_group(std::uint64_t group) {
    groups_[group] = {.has_ended = true, .members = {}};
    if (group == 0) is_world_open_ = false;
    mailbox.for_each_waiting_message([&](Message& message) {
        if (message.tag.group == group) mailbox.drop(message);
    });
}

void Admission::close() {
    is_closed_ = true;
    mailbox.for_each_receive([&](Receive& receive) { mailbox.fail(receive); });
    mailbox.drop_all();
}

}  // namespace ferrodist
