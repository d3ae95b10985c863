"""When gathered parameters are there, and when their memory may go, for all streams that read them.

A module may run on a stream of its own, as Megatron's shared experts do beside their dispatcher: each stream waits for
what it reads, and memory goes back to the stream that asked for it, which may have it again at once.

| later work | waits for | because |
|---|---|---|
| what a stream reads first | the gather | the bytes must be there |
| the stream that the memory goes back to | the other streams that have read | they may still do |
"""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mem.device import Backend, Stream

READ_AFTER_GATHER = "read after gather"
FREE_AFTER_READ = "free after read on another stream"


class Arrival:
    """Of one gather, made on the stream that asks for its memory.

    `meet` lets the current stream wait for the gather; None: it is work of the stream that this was made on.
    """

    def __init__(self, backend: Backend) -> None:
        self.meet: Callable[[], object] | None = None
        self._backend = backend
        self._home, self._home_key = backend.current_stream(), backend.stream_key()
        self._readers: dict[object, Stream] = {}

    def wait(self) -> None:
        """Let what comes next on the current stream read."""
        key = self._backend.stream_key()
        if key in self._readers:
            return
        self._readers[key] = stream = self._backend.current_stream()
        if self.meet is not None:
            self.meet()
        elif key != self._home_key:
            self._backend.wait(stream, self._backend.record(self._home), READ_AFTER_GATHER)

    def end(self) -> None:
        """Nobody reads from now on: let the memory be freed."""
        if self._home_key not in self._readers:
            with self._backend.on_stream(self._home):
                self.wait()
        for key, stream in self._readers.items():
            if key != self._home_key:
                self._backend.wait(self._home, self._backend.record(stream), FREE_AFTER_READ)
