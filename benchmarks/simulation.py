"""A year of a hundred schedules on virtual time: `python -m benchmarks.simulation [DAYS]`.

The mix is that of a company's crontabs: 45 daily and 30 on weekdays at quarters of an hour, 15 weekly, 5 monthly,
3 hourly through office hours, intervals of 8 hours and of a day; over eight zones, six of which change their clocks.
Handlers do nothing. Exit status 1 if a schedule's year is not what its recurrence says.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

from timebell import Arrived, Cron, Every
from timebell.recurrence import Spec
from timebell.sim.world import World

START = datetime(2027, 1, 1, tzinfo=UTC)
ZONES = (
    "America/New_York", "Europe/Berlin", "UTC", "Australia/Sydney", "Europe/London", "Asia/Seoul", "America/Chicago",
    "Europe/Paris",
)  # fmt: skip
QUARTERS = (0, 0, 30, 0, 15, 0, 30, 45)


def mix() -> list[Spec]:
    """The hundred."""
    return [
        *(Cron(f"{QUARTERS[n % 8]} {n * 5 % 24} * * *") for n in range(45)),
        *(Cron(f"{QUARTERS[n % 8]} {7 + n % 12} * * 1-5") for n in range(30)),
        *(Cron(f"0 {n} * * {n % 7}") for n in range(15)),
        *(Cron(f"0 {3 + n} 1 * *") for n in range(5)),
        *(Cron(f"{QUARTERS[n]} 9-17 * * 1-5") for n in range(3)),
        *(Every(each, anchor=START) for each in ("PT8H", "P1D")),
    ]


def simulate(days: float) -> tuple[int, float, float]:
    """Occurrences, real seconds, and seconds of CPU."""
    with World(start=START, seed=1) as world:
        app = world.new_app()
        seen: Counter[str | None] = Counter()

        @app.on("*", handles=True)
        async def count(event: Arrived) -> None:
            seen[event.schedule_id] += 1

        async def make() -> dict[str, int]:
            expected = {}
            for number, spec in enumerate(mix()):
                made = await app.schedule_repeat(f"job.{number}", spec, timezone=ZONES[number % 8])
                instants = made.recurrence.count(START, START + timedelta(days=days, microseconds=1))
                expected[made.id] = instants - (made.recurrence.next(START - timedelta(microseconds=1)) == START)
            return expected

        expected = world.run(make())
        began, worked = time.perf_counter(), time.process_time()
        world.run(world.advance(days=days))
        spent, worked = time.perf_counter() - began, time.process_time() - worked
        if seen != {id_: count for id_, count in expected.items() if count}:
            raise SystemExit("a schedule did not fire as often as its recurrence says")
        return sum(seen.values()), spent, worked


def main() -> None:
    """Print occurrences a second."""
    gc.freeze()  # as a process of its own does: see Timebell.run
    gc.set_threshold(50_000, 20, 100)
    days = float(sys.argv[1]) if len(sys.argv) > 1 else 365.0
    count, spent, worked = simulate(days)
    rate = f"{count:,} occurrences in {spent:.1f} s ({worked:.1f} s of CPU), {count / spent:,.0f} a second"
    print(f"{days:g} days of {len(mix())} schedules: {rate}")


if __name__ == "__main__":
    main()
