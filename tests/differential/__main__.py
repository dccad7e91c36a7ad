"""`python -m tests.differential`: the engine against the oracle, at every transition of every zone and more.

Prints cases and disagreements by class; exits with 7 if there are any.
"""

from __future__ import annotations

import argparse
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import islice

from timebell.errors import InvalidRecurrence
from timebell.recurrence import Cron, Recurrence
from timebell.recurrence.preview import iter_fires
from timebell.recurrence.zone_names import accepted_names

from . import cases, oracle

DAY, SECOND = oracle.DAY, oracle.SECOND
FIRST, LAST = 1970, 2041
CREATED = datetime(1970, 1, 1, tzinfo=UTC)
Found = tuple[Counter[str], list[str]]


def at_changes(name: str, seed: int, expressions: int) -> Found:
    """Yield cases at every offset change of a zone from 1970 to 2040: expressions, each from several instants."""
    rnd = random.Random(f"{name} {seed}")
    zone = oracle.info(name)
    counted: Counter[str] = Counter()
    wrong: list[str] = []
    for at in oracle.transitions(zone, FIRST, LAST):
        moved = oracle.offset(zone, at) - oracle.offset(zone, at - SECOND)
        first = (at - 2 * DAY).astimezone(zone).date()
        last = first + 5 * DAY
        low, high = (datetime(day.year, day.month, day.day, tzinfo=UTC) + DAY for day in (first, last - 3 * DAY))
        for _ in range(expressions):
            text = cases.around(rnd, zone, at)
            spec = oracle.Cron(text)
            kind = f"{'gap' if moved > timedelta(0) else 'fold'}, {'wildcard' if spec.wildcard else 'fixed'}"
            kind = "missing day" if moved >= DAY else kind
            wanted = [one for one in spec.fires(zone, first, last) if low < one < high]
            bound = Cron(text, allow_never=True).bind(name, created_at=CREATED)
            for start in cases.starts(rnd, at):
                counted[kind] += 1
                begin = max(start, low)
                if list(bound.between(begin + SECOND, high)) != [one for one in wanted if one > begin]:
                    wrong.append(f"{kind}: {text!r} in {name} from {begin:%Y-%m-%dT%H:%M:%SZ}")
            if list(back(bound, high, low)) != wanted[::-1]:
                wrong.append(f"{kind}, backwards: {text!r} in {name} before {high:%Y-%m-%dT%H:%M:%SZ}")
    return counted, wrong


def back(bound: Recurrence, before: datetime, after: datetime) -> Iterator[datetime]:
    found = bound.previous(before)
    while found is not None and found > after:
        yield found
        found = bound.previous(found)


def on_days(part: int, seed: int, count: int) -> Found:
    """Yield cases of all kinds of day fields, in any zone, from any day."""
    rnd = random.Random(f"days {part} {seed}")
    counted: Counter[str] = Counter()
    wrong: list[str] = []
    zones = sorted(accepted_names())
    while counted.total() < count:
        text, name = cases.days(rnd), rnd.choice(zones)
        start = date(1971, 1, 1) + rnd.randrange(25_000) * DAY
        zone = oracle.info(name)
        spec = oracle.Cron(text)
        wanted = spec.fires(zone, start, start + 366 * DAY)
        low, high = (datetime(day.year, day.month, day.day, tzinfo=UTC) for day in (start, start + 364 * DAY))
        low += DAY
        try:
            bound = Cron(text).bind(name, created_at=low)
        except InvalidRecurrence as error:
            if error.code == "NEVER_FIRES" and not wanted:
                counted["days, never"] += 1
            continue
        kind = "days, L W #" if any(sign in text for sign in "LW#") and "L" in text.replace("JUL", "") else "days"
        counted[kind] += 1
        if list(bound.between(low, high)) != [one for one in wanted if low <= one < high]:
            wrong.append(f"{kind}: {text!r} in {name} from {low:%Y-%m-%d}")
        following = list(islice(iter_fires(bound, low), 2))
        if following != [one for one in wanted if one > low][:2] and following and following[-1] < high:
            wrong.append(f"{kind}, next: {text!r} in {name} from {low:%Y-%m-%d}")
    return counted, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--expressions", type=int, default=8, help="for each change of each zone")
    parser.add_argument("--days", type=int, default=20_000, help="cases about day fields")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    counted: Counter[str] = Counter()
    wrong: list[str] = []
    zones = sorted(accepted_names(), key=lambda name: zlib.crc32(name.encode()))
    parts = 40
    with ProcessPoolExecutor(chosen.jobs) as pool:
        work = [
            pool.map(partial(at_changes, seed=chosen.seed, expressions=chosen.expressions), zones),
            pool.map(partial(on_days, seed=chosen.seed, count=chosen.days // parts), range(parts)),
        ]
        for done, found in enumerate((one for results in work for one in results), 1):
            counted += found[0]
            wrong += found[1]
            if sys.stderr.isatty():
                print(f"\r{done}/{len(zones) + parts}", end="", file=sys.stderr)
    print(f"{'class':<20} {'cases':>10}")
    for kind, count in sorted(counted.items()):
        print(f"{kind:<20} {count:>10,}")
    print(f"{'together':<20} {counted.total():>10,}   disagreements: {len(wrong)}")
    for line in wrong[:40]:
        print(f"  {line}")
    return 7 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
