"""What a model has done: forwards, rows and seconds, which a device is asked for only when somebody reads them."""

from typing import Any

from opt_tree.core.target import Work

_UNREAD = 100
"""Of so many forwards at most it is kept when they began and ended, until somebody asks for their seconds."""


class Meter:
    """Counts the forwards of one model. On CUDA their moments are events, and to read one is to wait for the device."""

    def __init__(self, work: Work | None = None) -> None:
        self._work = work or Work()
        self._running: list[tuple[Any, Any]] = []

    def add(self, rows: int, begin: Any, end: Any) -> None:
        """Count a forward over so many rows. Its moments are seconds of the host's clock, or events of a device."""
        self._work += Work(1, rows)
        self._running.append((begin, end))
        if len(self._running) > _UNREAD:
            _ = self.work  # nobody asks

    @property
    def work(self) -> Work:
        """All that was counted. Waits for the device's last forward where it is not yet done."""
        for begin, end in self._running:
            if isinstance(end, float):
                seconds = end - begin
            else:
                end.synchronize()
                seconds = begin.elapsed_time(end) / 1000
            self._work += Work(0, 0, seconds)
        self._running.clear()
        return self._work

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with its seconds read: a device's events are not copied."""
        return {"_work": self.work, "_running": []}
