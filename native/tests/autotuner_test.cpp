// The choice between two implementations from measured times.
#include "base/two_way_autotuner.h"

#include "check.h"
#include "collectives/context.h"

using namespace ferrodist;

namespace {

// Makes `num_calls` calls with fixed times per choice, and counts those with the second choice.
int count_second(TwoWayAutotuner& tuner, int num_calls, double first_seconds, double second_seconds) {
    int count = 0;
    for (int i = 0; i < num_calls; ++i) {
        const Choice choice = tuner.next();
        count += choice == Choice::second;
        tuner.record(choice, choice == Choice::second ? second_seconds : first_seconds, 1000);
    }
    return count;
}

void test_the_faster_choice_is_used_and_the_other_tried() {
    TwoWayAutotuner tuner(2.0, 16);
    count_second(tuner, 96, 1.0, 1.0);
    require(tuner.better() == Choice::first, "the first, where nothing is won");
    require(count_second(tuner, 160, 1.0, 0.6) == 10, "the second choice in one call of 16, where it gains too little");
    count_second(tuner, 8, 5.0, 1.0);
    require(tuner.better() == Choice::second, "the second, where much is won, soon");
    require(count_second(tuner, 160, 5.0, 1.0) == 150, "the first choice in one call of 16");
    count_second(tuner, 17, 1.0, 1.0);
    require(tuner.better() == Choice::first, "and back as soon as that is fast again");
}

void test_preempted_calls_are_ignored() {
    TwoWayAutotuner tuner(2.0, 16);
    count_second(tuner, 96, 1.0, 1.0);
    for (int i = 0; i < 3; ++i) tuner.record(Choice::first, 1000.0, 1000);
    require(tuner.better() == Choice::first, "three that took long");
    tuner.record(Choice::first, 1.0, 1000);
    for (int i = 0; i < 3; ++i) tuner.record(Choice::first, 1000.0, 1000);
    require(tuner.better() == Choice::first, "and three more");
    tuner.record(Choice::first, 1000.0, 1000);
    require(tuner.better() == Choice::second, "four in a row are no accident");
}

void test_both_choices_are_measured_soon() {
    TwoWayAutotuner tuner(2.0, 16);
    count_second(tuner, 8, 1.0, 10.0);
    require(tuner.better() == Choice::first, "a slow second choice is used");
}

void test_ranks_follow_rank_0() {
    TransferMode leader;
    TransferMode other;
    const auto kind = TransferMode::kind_of(Operation::all_gather, 1 << 20);
    const auto elsewhere = TransferMode::kind_of(Operation::all_gather, 1 << 22);
    require(kind != elsewhere && kind != TransferMode::kind_of(Operation::reduce_scatter, 1 << 20), "kinds");
    require(TransferMode::kind_of(Operation::share, ~std::size_t{0}) < TransferMode::num_kinds, "no kind beyond");
    int num_staged = 0;
    for (int i = 0; i < 320; ++i) {
        require(leader.choice_for(kind) == other.choice_for(kind), "ranks choose differently in the same call");
        const std::uint64_t advice = leader.advise(kind);
        leader.record(kind, leader.choice_for(kind), leader.choice_for(kind) == TransferMode::staged_copy ? 1.0 : 1.5,
                      1 << 20);
        num_staged += leader.choice_for(kind) == TransferMode::staged_copy;
        leader.follow(advice);
        other.follow(advice);
    }
    require(num_staged > 300, "the faster one, %d", num_staged);
    require(other.choice_for(elsewhere) == TransferMode::direct_read, "of other kinds nothing was said");
    other.follow(0);
    other.follow(~std::uint64_t{0});
    require(other.choice_for(kind) == leader.choice_for(kind), "what says nothing changes nothing");
}

}  // namespace

int main() {
    test_the_faster_choice_is_used_and_the_other_tried();
    test_preempted_calls_are_ignored();
    test_both_choices_are_measured_soon();
    test_ranks_follow_rank_0();
    std::puts("choices: all right");
}
