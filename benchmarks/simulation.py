"""Simulate a year of a hundred schedules on virtual time: `python -m benchmarks.simulation [DAYS]`.

The mix resembles the crontabs of a company: 45 daily and 30 weekday schedules at quarters of an hour, 15 weekly, 5
monthly, 3 hourly during office hours, and intervals of 8 hours and of a day, in eight zones, six of which have daylight
saving time. Handlers do nothing. The exit status is 1 if a schedule fires more or less often than its recurrence.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

from benchmarks import child
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
    """Return the hundred recurrences."""
    return [
        *(Cron(f"{QUARTERS[n % 8]} {n * 5 % 24} * * *") for n in range(45)),
        *(Cron(f"{QUARTERS[n % 8]} {7 + n % 12} * * 1-5") for n in range(30)),
        *(Cron(f"0 {n} * * {n % 7}") for n in range(15)),
        *(Cron(f"0 {3 + n} 1 * *") for n in range(5)),
        *(Cron(f"{QUARTERS[n]} 9-17 * * 1-5") for n in range(3)),
        *(Every(each, anchor=START) for each in ("PT8H", "P1D")),
    ]


def simulate(days: float) -> tuple[int, float, float]:
    """Simulate `days`; return the number of occurrences, the elapsed seconds and the CPU seconds."""
    with World(start=START, seed=1) as world:
        app = world.new_app()
        fired: Counter[str | None] = Counter()

        @app.on("*", handles=True)
        async def count(event: Arrived) -> None:
            fired[event.schedule_id] += 1

        async def create_schedules() -> dict[str, int]:
            expected = {}
            for number, spec in enumerate(mix()):
                schedule = await app.schedule_repeat(f"job.{number}", spec, timezone=ZONES[number % 8])
                instants = schedule.recurrence.count(START, START + timedelta(days=days, microseconds=1))
                starts_now = schedule.recurrence.next(START - timedelta(microseconds=1)) == START
                expected[schedule.id] = instants - starts_now
            return expected

        expected = world.run(create_schedules())
        began, cpu_began = time.perf_counter(), time.process_time()
        world.run(world.advance(days=days))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        if fired != {id_: count for id_, count in expected.items() if count}:
            raise SystemExit("a schedule did not fire as often as its recurrence says")
        return sum(fired.values()), seconds, cpu_seconds


def main() -> None:
    """Print the occurrences per second."""
    child.tune_process()
    days = float(sys.argv[1]) if len(sys.argv) > 1 else 365.0
    count, seconds, cpu_seconds = simulate(days)
    rate = f"{count:,} occurrences in {seconds:.1f} s ({cpu_seconds:.1f} s of CPU), {count / seconds:,.0f} per second"
    print(f"{days:g} days of {len(mix())} schedules: {rate}")


if __name__ == "__main__":
    main()
