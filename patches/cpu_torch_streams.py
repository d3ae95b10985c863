"""torch.cuda's streams and events on the host, where everything runs in order: a stream is only an identity.

Classes, because Megatron makes and compares them. Which stream is current is remembered per thread, as on a device.
"""

from __future__ import annotations

import threading
import time

import torch

from mindspeed_mem.patching import around, replace


class Stream:
    """Work submitted to it is done when the call returns."""

    def __init__(self, device=None, priority=0, **kwargs):
        self.device = torch.device("cpu")
        self.priority = priority
        self.cuda_stream = id(self)

    def synchronize(self, *unused):
        """Done already."""

    wait_stream = wait_event = synchronize

    def query(self):
        """Whether all work is done."""
        return True

    def record_event(self, event=None):
        """The event (a new one by default), recorded now."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """A moment on the host's clock."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._moment = None

    def record(self, stream=None):
        """Take the time."""
        self._moment = time.perf_counter()

    def query(self):
        """Whether it has happened."""
        return True

    def wait(self, stream=None):
        """Happened already."""

    synchronize = wait

    def elapsed_time(self, end_event):
        """Milliseconds from this event to `end_event`."""
        if self._moment is None or end_event._moment is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (end_event._moment - self._moment) * 1e3


class StreamContext:
    """``with torch.cuda.stream(stream)``; None changes nothing."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self._before = _thread.stream
        _thread.stream = self.stream or self._before
        return self.stream

    def __exit__(self, *exc_info):
        _thread.stream = self._before


_default_stream = Stream()


class _Thread(threading.local):
    stream = _default_stream


_thread = _Thread()

for _name, _class in {"Stream": Stream, "Event": Event, "StreamContext": StreamContext}.items():
    replace(f"torch.cuda:{_name}", _class, declared_by=__name__)


@around("torch.cuda:current_stream")
def _current_stream(original, *args, **kwargs):
    """The one that this thread chose last."""
    return _thread.stream


@around("torch.cuda:default_stream")
def _get_default_stream(original, *args, **kwargs):
    """The one that every thread starts with."""
    return _default_stream


@around("torch.cuda:set_stream")
def _set_stream(original, stream):
    """Choose the stream of this thread."""
    _thread.stream = stream or _thread.stream


@around("torch:Tensor.record_stream")
def _record_stream(original, *args, **kwargs):
    """Host memory is not recycled behind anybody's back."""
