"""Reports of ferrodist bench with made-up figures."""

from ferrodist.bench.cases import DataType, Operation, Peer, Suite
from ferrodist.bench.model import Constants
from ferrodist.bench.report import CaseReport, Machine, Measurement, PeerReport, Report


def measured(peer, *microseconds):
    return Measurement.from_batches(peer, [value * 1e-6 for value in microseconds], 10, {})


def case(*measurements, operation="allreduce", size_bytes=16384, suite="collectives", num_ranks=2, num_hosts=1, **more):
    return CaseReport(
        suite=Suite(suite),
        operation=Operation(operation),
        dtype=DataType.FLOAT32,
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        size_bytes=size_bytes,
        num_elements=size_bytes // 4,
        measurements=list(measurements),
        **more,
    )


def machine(load=0.0):
    return Machine(
        processor="Processor X",
        num_processors=2,
        caches={"L3": "32768K"},
        memory_bytes=8 << 30,
        huge_pages="madvise",
        system="Linux",
        python="3.11",
        load=load,
    )


def report(*cases, load=0.0):
    peers = [
        PeerReport(
            peer=Peer.NATIVE, num_ranks=2, versions={"torch": "2.13"}, command="python -m ferrodist.bench.worker"
        ),
        PeerReport(peer=Peer.MPICH, num_ranks=2, reason="no wheel | none"),
    ]
    return Report(
        started="2026-01-02T03:04:05+00:00",
        machine=machine(load),
        settings={"rounds": "3"},
        ferrodist="0.1.0",
        peers=peers,
        cases=list(cases),
        is_complete=True,
    )


CONSTANTS = Constants(
    processors=2,
    call=1e-6,
    copied_byte=1e-10,
    folded_byte=5e-11,
    line=1e-8,
    handover=2e-6,
    message=4e-6,
    sent_byte=5e-10,
)


def growth_report():
    """Two numbers of ranks, one and two hosts: the time of 8 B grows tenfold, that of 1 MiB by less."""
    report_ = report(
        *(
            case(
                measured(Peer.NATIVE, microseconds * ranks * hosts),
                measured(Peer.GLOO, 200 * ranks),
                size_bytes=size,
                suite="growth",
                num_ranks=ranks,
                num_hosts=hosts,
            )
            for hosts in (1, 2)
            for ranks in (2, 4)
            for size, microseconds in ((8, 1 if ranks == 2 else 5), (1 << 20, 100))
        )
    )
    report_.constants = CONSTANTS
    return report_


LOST = case(measured(Peer.NATIVE, 4, 5, 6), measured(Peer.GLOO, 50), measured(Peer.OPENMPI, 4), measured(Peer.LIMIT, 2))
WON = case(measured(Peer.NATIVE, 4), measured(Peer.GLOO, 8), size_bytes=8)
BARRIER = case(measured(Peer.NATIVE, 1), operation="barrier", size_bytes=0, not_offered={Peer.LIMIT: "no bytes"})


def overlap(peer, value):
    parts = {"alone": [0.005], "computing": [0.004], "together": [0.005 * value]}
    return Measurement.from_batches(peer, [value], 9, parts)


OVERLAP = case(overlap(Peer.NATIVE, 1.5), overlap(Peer.GLOO, 1.2), operation="overlap", suite="overlap")
