"""Strategies for handler behavior, schedules and policies.

Whole seconds from few values, so that rare coincidences are frequent.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from tests.model.ledger import RETRIES, RETRY_DELAY, TIMEOUT
from timebell import Cron, Every, RRule

START = datetime(2027, 3, 1, 12, tzinfo=UTC)

plans = st.builds(
    lambda do, takes: {"do": do, "takes": 400 if do == "hang" else takes},
    st.sampled_from(["ok", "ok", "ok", "flaky", "fail", "snooze", "cancel", "hang", "within"]),
    st.sampled_from([0, 0, 1, 4, 22]),
)
QUEUE = "narrow"
limits = st.fixed_dictionaries({
    "concurrency": st.sampled_from([None, None, 1, 2]),
    "concurrency_per_group": st.sampled_from([None, 1, 1, 2]),
    "rate": st.sampled_from([None, None, 2]),
    "per": st.just(10),
})  # fmt: skip
"""Limits of the one limited queue."""
where = st.sampled_from([{}, {}, {}, {"queue": QUEUE}, {"queue": QUEUE, "group": "a"}, {"queue": QUEUE, "group": "b"}])
policies = st.fixed_dictionaries({
    "overlap": st.sampled_from(["skip", "queue", "cancel_previous", "allow"]),
    "catch_up": st.sampled_from(["latest", "all", "skip"]),
    "catch_up_limit": st.sampled_from([100, 3]),
    "catch_up_window": st.sampled_from([86_400, 100]),
    "catch_up_pace": st.sampled_from([0, 0, 3]),
    "hold_above": st.sampled_from([1000, 2]),
    "when_late": st.sampled_from(["run", "run", "run", "expire"]),
    "jitter": st.sampled_from([0, 0, 5]),
})  # fmt: skip
retry = {"attempts": RETRIES, "backoff": "fixed", "delay": RETRY_DELAY, "jitter": 0}


@dataclass(frozen=True)
class Grid:
    """A recurrence whose instants are `step` seconds apart. A fixed delay has no computable instants."""

    kind: str
    step: int
    moves: tuple[tuple[datetime, datetime], ...] = ()
    """Moved instants (from, to); each leaves a row at its original instant."""

    def spec(self) -> Any:
        """Return the spec as users write it."""
        if self.kind == "cron":
            return Cron(f"*/{self.step} * * * * *" if self.step < 60 else f"*/{self.step // 60} * * * *")
        if self.kind == "rrule":
            return RRule(f"FREQ=SECONDLY;INTERVAL={self.step}", START)
        return Every(timedelta(seconds=self.step), since="last_end" if self.kind == "delay" else None)

    def between(self, after: datetime, until: datetime, made: datetime) -> list[datetime]:
        """Return the instants in (after, until] for a schedule created at `made`."""
        anchor, step = made if self.kind == "interval" else START, timedelta(seconds=self.step)
        first = anchor + ((after - anchor) // step + 1) * step
        found = {first + n * step for n in range(max(0, (until - first) // step + 1))}
        return sorted(found | {to for _, to in self.moves if after < to <= until})


Drawn = tuple[dict[str, Any], dict[str, Any], Grid, dict[str, Any]]
grids = st.builds(
    Grid,
    st.sampled_from(["cron", "interval", "rrule", "delay"]),
    st.sampled_from([5, 20, 60]),
)
schedules = st.tuples(plans, policies, grids, where)


def options(one: Drawn, grid: Grid) -> dict[str, Any]:
    """Return the options of a schedule."""
    plan, given, _, where = one
    if grid.kind == "delay":
        given = {}
    return {"payload": plan, "retry": retry, "timeout": TIMEOUT, **given, **where}
