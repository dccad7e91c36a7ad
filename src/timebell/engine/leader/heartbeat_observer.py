"""Measure how long nodes and remote workers have been silent."""

from __future__ import annotations

from collections.abc import Mapping


class HeartbeatObserver:
    """Dates heartbeat counters by the monotonic clock of the observer, so no clock of another machine matters."""

    def __init__(self) -> None:
        self._last_seen: dict[str, tuple[int, float]] = {}

    def measure_silence(self, heartbeats: Mapping[str, int], now: float) -> dict[str, float]:
        """Return for how many seconds each counter has not changed. `now` is in monotonic seconds."""
        seen: dict[str, tuple[int, float]] = {}
        for id_, heartbeat in heartbeats.items():
            last = self._last_seen.get(id_)
            seen[id_] = last if last is not None and last[0] == heartbeat else (heartbeat, now)
        self._last_seen = seen
        return {id_: now - since for id_, (_, since) in seen.items()}
