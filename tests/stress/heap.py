"""What the C library's heap does with tensors of some MB in threads that come and go, without ferrodist.

    python tests/stress/heap.py --seconds 60
    MALLOC_MMAP_THRESHOLD_=131072 python tests/stress/heap.py --seconds 60

Resident memory is printed while three threads make tensors and drop them, and end a thread each time, as
`soak.py` does through groups that are made and closed.
"""

from __future__ import annotations

import argparse
import threading
import time

import torch

__all__: list[str] = []


def _resident_megabytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - as short as that
        return int(file.read().split()[1]) * 4096 >> 20


def _round(number: int) -> None:
    for count in (10, 100_000, 700_000 + number % 7 * 100_000):
        tensors = [torch.ones(count) for _ in range(3)]
        small = [bytearray(3000) for _ in range(50)]
        assert torch.stack(tensors).sum().item() == 3 * count
        del small
    helper = threading.Thread(target=lambda: [torch.ones(300_000).add_(1) for _ in range(4)])
    helper.start()
    helper.join()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    started = time.monotonic()

    def work() -> None:
        number = 0
        while time.monotonic() - started < seconds:
            _round(number)
            number += 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    print(f"   0 s  {_resident_megabytes()} MB")
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(seconds / 12)
        print(f"{time.monotonic() - started:4.0f} s  {_resident_megabytes()} MB", flush=True)


if __name__ == "__main__":
    _main()
