// Which of two ways is gone.
#include "base/two_way_autotuner.h"

#include "check.h"
#include "collectives/context.h"

using namespace ferrodist;

namespace {

// Goes on with so many calls that take as long as said, and counts those that went the second way.
int count_second(TwoWayAutotuner& choice, int num_calls, double first_seconds, double second_seconds) {
    int count = 0;
    for (int i = 0; i < num_calls; ++i) {
        const Way way = choice.next();
        count += way == Way::second;
        choice.took(way, way == Way::second ? second_seconds : first_seconds, 1000);
    }
    return count;
}

void test_the_faster_way_is_gone_and_the_other_one_tried() {
    TwoWayAutotuner choice(2.0, 16);
    count_second(choice, 96, 1.0, 1.0);
    require(choice.better() == Way::first, "the first, where nothing is won");
    require(count_second(choice, 160, 1.0, 0.6) == 10, "a sixteenth the other way, where too little is won");
    count_second(choice, 8, 5.0, 1.0);
    require(choice.better() == Way::second, "the second, where much is won, soon");
    require(count_second(choice, 160, 5.0, 1.0) == 150, "a sixteenth the first way");
    count_second(choice, 17, 1.0, 1.0);
    require(choice.better() == Way::first, "and back as soon as that is fast again");
}

void test_calls_that_were_stopped_mean_nothing() {
    TwoWayAutotuner choice(2.0, 16);
    count_second(choice, 96, 1.0, 1.0);
    for (int i = 0; i < 3; ++i) choice.took(Way::first, 1000.0, 1000);
    require(choice.better() == Way::first, "three that took long");
    choice.took(Way::first, 1.0, 1000);
    for (int i = 0; i < 3; ++i) choice.took(Way::first, 1000.0, 1000);
    require(choice.better() == Way::first, "and three more");
    choice.took(Way::first, 1000.0, 1000);
    require(choice.better() == Way::second, "four in a row are no accident");
}

void test_both_ways_are_known_soon() {
    TwoWayAutotuner choice(2.0, 16);
    count_second(choice, 8, 1.0, 10.0);
    require(choice.better() == Way::first, "a second way that is slow is found out");
}

void test_ranks_go_the_way_that_rank_0_says() {
    TransferMode leader;
    TransferMode other;
    const auto kind = TransferMode::kind_of(Operation::all_gather, 1 << 20);
    const auto elsewhere = TransferMode::kind_of(Operation::all_gather, 1 << 22);
    require(kind != elsewhere && kind != TransferMode::kind_of(Operation::reduce_scatter, 1 << 20), "kinds");
    require(TransferMode::kind_of(Operation::share, ~std::size_t{0}) < TransferMode::num_kinds, "no kind beyond");
    int num_by_slots = 0;
    for (int i = 0; i < 320; ++i) {
        require(leader.way_of(kind) == other.way_of(kind), "the same way at the same call");
        const std::uint64_t advice = leader.advise(kind);
        leader.took(kind, leader.way_of(kind), leader.way_of(kind) == TransferMode::by_slots ? 1.0 : 1.5, 1 << 20);
        num_by_slots += leader.way_of(kind) == TransferMode::by_slots;
        leader.follow(advice);
        other.follow(advice);
    }
    require(num_by_slots > 300, "the faster one, %d", num_by_slots);
    require(other.way_of(elsewhere) == TransferMode::in_place, "of other kinds nothing was said");
    other.follow(0);
    other.follow(~std::uint64_t{0});
    require(other.way_of(kind) == leader.way_of(kind), "what says nothing changes nothing");
}

}  // namespace

int main() {
    test_the_faster_way_is_gone_and_the_other_one_tried();
    test_calls_that_were_stopped_mean_nothing();
    test_both_ways_are_known_soon();
    test_ranks_go_the_way_that_rank_0_says();
    std::puts("choices: all right");
}
