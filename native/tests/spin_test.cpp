// The spin phase of a wait: how long it polls, and what ends it.
#include <thread>

#include "base/spin.h"
#include "check.h"

using namespace ferrodist;
using namespace std::chrono_literals;

namespace {

// Polls until it is time to sleep; returns the number of polls.
int count_tries(Spin& spin) {
    int tries = 1;
    while (spin.should_retry()) ++tries;
    return tries;
}

void test_a_spin_is_over_until_restarted() {
    Contention contention;
    Spin spin(contention, 0us, Spin::on_connections);
    require(count_tries(spin) == Spin::on_connections.tries_per_check, "a look at the clock after each so many tries");
    require(count_tries(spin) == 1, "it is over, and stays so");
    spin.restart();
    require(count_tries(spin) == Spin::on_connections.tries_per_check, "it begins anew");
    Spin heavy(contention, 0us, Spin::on_connections, 500);
    require(count_tries(heavy) == 1, "a try that looks at much is followed by a look at the clock");
}

void test_a_spin_lasts_as_long_as_asked() {
    Contention contention;
    const auto begin = Clock::now();
    Spin spin(contention, 2000us, Spin::on_connections);
    count_tries(spin);
    // It may be shorter on a machine that preempts it; then contention is reported.
    require(Clock::now() - begin >= 2000us || contention.is_seen(Clock::now()), "as long as it says");
}

void test_preemption_between_two_clock_checks_is_noted() {
    Contention contention;
    Spin spin(contention, 10s, Spin::on_connections);
    require(spin.check_clock(), "the first look");
    std::this_thread::sleep_for(5ms);
    require(!spin.check_clock(), "somebody ran");
    require(contention.is_seen(Clock::now()), "the next ones know");
    Spin next(contention, 10s, Spin::on_connections);
    const auto begin = Clock::now();
    count_tries(next);
    require(Clock::now() - begin < 5s, "and are short");
}

void test_a_sleep_between_two_waits_is_not_preemption() {
    Contention contention;
    Spin spin(contention, 10s, Spin::on_connections);
    require(spin.check_clock(), "the first look");
    std::this_thread::sleep_for(5ms);
    spin.restart();
    require(spin.check_clock() && !contention.is_seen(Clock::now()), "it slept by itself");
}

void test_a_thread_that_shares_a_processor_migrates() {
    Contention contention;
    const auto count_yields = [&](Clock::duration gone) {
        int yields = 1;
        while (yields < 100 && !contention.should_migrate(gone)) ++yields;
        return yields;
    };
    const int patience = count_yields(20us);
    require(patience > 1 && patience < 100, "some yields, %d", patience);
    require(count_yields(20us) == patience, "then as many again");
    for (int i = 0; i < 100; ++i)
        require(!contention.should_migrate(i % 2 == 0 ? 20us : 1us), "not when it is alone now and then");
}

void test_migration_keeps_the_affinity_mask() {
    cpu_set_t before;
    cpu_set_t after;
    require(::sched_getaffinity(0, sizeof before, &before) == 0, "affinity");
    const int here = ::sched_getcpu();
    migrate_thread();
    require(::sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&before, &after), "as it was");
    // On a busy machine it may have been moved back by now.
    std::printf("moved from processor %d to %d of %d\n", here, ::sched_getcpu(), CPU_COUNT(&before));
}

}  // namespace

int main() {
    test_a_spin_is_over_until_restarted();
    test_a_spin_lasts_as_long_as_asked();
    test_preemption_between_two_clock_checks_is_noted();
    test_a_sleep_between_two_waits_is_not_preemption();
    test_a_thread_that_shares_a_processor_migrates();
    test_migration_keeps_the_affinity_mask();
    std::puts("spins: all right");
}
