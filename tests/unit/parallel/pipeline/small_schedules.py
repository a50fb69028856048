"""Small pipeline schedules, written by hand, for tests of what is done with schedules."""

from __future__ import annotations

from ferrodist.parallel.pipeline.schedule.ir import Schedule


def schedule_of(name: str, stage_ranks: list[int], num_microbatches: int, *rows: str) -> Schedule:
    """A schedule whose ranks do what the rows say."""
    lines = [
        f"ferrodist pipeline schedule: {name}",
        f"stage ranks: {' '.join(map(str, stage_ranks))}",
        f"microbatches: {num_microbatches}",
        *(f"rank {rank}: {row}" for rank, row in enumerate(rows)),
    ]
    return Schedule.from_text("\n".join(lines))


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    rows = [
        " ".join(f"{kind}{rank}.{microbatch}" for kind in "FB" for microbatch in range(num_microbatches))
        for rank in range(num_ranks)
    ]
    return schedule_of("GPipe", list(range(num_ranks)), num_microbatches, *rows)


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Schedule:
    """As soon as a rank can run a backward it does, and then one forward for each backward."""
    rows = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - rank, num_microbatches)
        row = [f"F{rank}.{microbatch}" for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            row.append(f"B{rank}.{microbatch}")
            row += [f"F{rank}.{microbatch + ahead}"] if microbatch + ahead < num_microbatches else []
        rows.append(" ".join(row))
    return schedule_of("1F1B", list(range(num_ranks)), num_microbatches, *rows)


def divided_v() -> Schedule:
    """Four stages that go down the ranks and up again, with backwards in two parts."""
    return schedule_of(
        "V",
        [0, 1, 1, 0],
        2,
        "F0.0 F0.1 F3.0 I3.0 F3.1 I3.1 W3.0 I0.0 W0.0 I0.1 W3.1 W0.1",
        "F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 W2.0 I2.1 I1.1 W1.0 W2.1 W1.1",
    )


def interleaved() -> Schedule:
    """Four stages that go round the ranks twice; some backwards are divided, others not."""
    return schedule_of(
        "interleaved",
        [0, 1, 0, 1],
        2,
        "F0.0 F0.1 F2.0 F2.1 B2.0 I2.1 B0.0 W2.1 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 I3.1 B1.0 W3.1 I1.1 W1.1",
    )
