"""A group of threads that counts what travels."""

from ferrodist.backends.simulated import SimulatedBackend


class ByteCounter(SimulatedBackend):
    """Counts the bytes that this rank sends, by whatever group of it: ``num_bytes``."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.num_bytes = 0

    def _start_send(self, send):
        self.num_bytes += len(send.data)
        super()._start_send(send)
