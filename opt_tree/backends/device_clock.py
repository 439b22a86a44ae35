"""Seconds of forwards by a device's own clock: events that are recorded at once and read when somebody asks."""

from typing import Any

import torch

from opt_tree.backend import Meter
from opt_tree.target import Work

_UNREAD = 100
"""Of so many forwards at most it is kept when they began and ended, until somebody asks for their seconds."""


class DeviceMeter(Meter):
    """A `Meter` whose moments are events of a CUDA device; to read one is to wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._running: list[tuple[Any, Any]] = []
        super().__init__()

    def now(self) -> torch.cuda.Event:
        """When the device has come so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, rows: int, begin: Any, end: Any) -> None:
        self._work += Work(1, rows)
        self._running.append((begin, end))
        if len(self._running) > _UNREAD:
            _ = self.work  # nobody asks

    @property
    def work(self) -> Work:  # type: ignore[override]
        """All that was counted. Waits for the device's last forward where it is not yet done."""
        for begin, end in self._running:
            end.synchronize()
            self._work += Work(0, 0, begin.elapsed_time(end) / 1000)
        self._running.clear()
        return self._work

    @work.setter
    def work(self, work: Work) -> None:
        self._work = work
        self._running.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with its seconds read: a device's events are not copied."""
        return {"device": self.device, "_work": self.work, "_running": []}


def meter_of(device: torch.device) -> Meter:
    """A new meter of forwards on this device: by the host's clock where the host computes them."""
    return DeviceMeter(device) if device.type == "cuda" else Meter()
