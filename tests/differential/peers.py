"""`python -m tests.differential.peers`: the engine compared with other libraries; every disagreement is classified.

A disagreement counts as explained only if the oracle agrees with the engine and the stated rule is verified on
the case. Exits with 7 if any is left. cronsim, croniter and dateutil come with requirements/bench.txt;
cron-parser and croner are installed from npm into a temporary folder, or skipped with a warning.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from timebell.errors import InvalidRecurrence
from timebell.recurrence import Cron
from timebell.recurrence.preview import iter_fires
from timebell.recurrence.zone_names import accepted_names

from . import cases, oracle

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
COUNT = 5
LAST = 2025  # Node has zone data of its own; later years differ by release
NPM = ("cron-parser@5.10.5", "croner@11.0.1")
Ask = Callable[[str, str, datetime], list[datetime]]


class Case(NamedTuple):
    kind: str
    text: str
    zone: str
    start: datetime


def generate(seed: int, most: int) -> Iterator[Case]:
    """Generate the same number of cases of every class."""
    rnd = random.Random(seed)
    zones = sorted(accepted_names())
    wanted = Counter(dict.fromkeys(
        ("plain", "starred day field", "L W #", "seconds", "gap, fixed", "gap, wildcard", "fold, fixed",
         "fold, wildcard", "start in a fold", "missing day"), most,
    ))  # fmt: skip
    while wanted.total():
        zone = rnd.choice(zones)
        for case in (*_calendar(rnd, zone), *_changes(rnd, zone)):
            if wanted[case.kind] > 0:
                wanted[case.kind] -= 1
                yield case


def _calendar(rnd: random.Random, zone: str) -> Iterator[Case]:
    start = datetime(2000, 1, 1, tzinfo=UTC) + rnd.randrange(9_000) * DAY + rnd.randrange(86_400) * timedelta(seconds=1)
    text = cases.days(rnd)
    fields = text.split()
    if len(fields) != 5 or "?" in text or "+" in text:
        return
    kind = "plain"
    if any(sign in fields[2] + fields[4] for sign in "LW#"):
        kind = "L W #"
    elif fields[2] != "*" and fields[4] != "*" and (fields[2][0] == "*" or fields[4][0] == "*"):
        kind = "starred day field"
    yield Case(kind, text, zone, start)
    yield Case("seconds", f"{rnd.randrange(60)},{rnd.randrange(60)} {fields[0]} {fields[1]} * * *", zone, start)


def _changes(rnd: random.Random, zone: str) -> Iterator[Case]:
    info = oracle.info(zone)
    for at in rnd.sample(known := _transitions(zone), min(len(known), 3)):
        moved = oracle.offset(info, at) - oracle.offset(info, at - oracle.SECOND)
        text = cases.around(rnd, info, at)
        fields = text.split()
        if len(fields) != 5 or any(sign in text for sign in "?LW#") or _starred(fields):
            continue
        form = "wildcard" if fields[0][0] == "*" or fields[1][0] == "*" else "fixed"
        kind = "missing day" if moved >= DAY else f"{'gap' if moved > timedelta(0) else 'fold'}, {form}"
        yield Case(kind, text, zone, at - DAY - rnd.randrange(7200) * oracle.SECOND)
        if kind.startswith("fold"):
            yield Case("start in a fold", text, zone, at + rnd.randrange(-3600, 3600) * oracle.SECOND)


_known: dict[str, list[datetime]] = {}


def _transitions(zone: str) -> list[datetime]:
    if zone not in _known:
        _known[zone] = oracle.transitions(oracle.info(zone), 1980, LAST)
    return _known[zone]


def _starred(fields: list[str]) -> bool:
    return fields[2] != "*" and fields[4] != "*"


def ours(case: Case) -> list[datetime] | None:
    try:
        bound = Cron(case.text).bind(case.zone, created_at=case.start)
    except InvalidRecurrence:
        return None
    return list(islice(iter_fires(bound, case.start), COUNT))


def why(case: Case, mine: list[datetime], theirs: list[datetime]) -> str | None:
    """Return the rule that explains a disagreement, verified on the case, or None."""
    first = min(set(mine) ^ set(theirs), default=None)
    if theirs != sorted(set(theirs)):
        return "goes back in time, or repeats an instant"
    if first is None or theirs[0] <= case.start:
        return "gives an instant that is not after the start"
    start = case.start.astimezone(oracle.info(case.zone)).date() - DAY
    end = (mine[-1] + 4 * DAY).date()
    spec = oracle.Cron(case.text)
    if [one for one in spec.fires(oracle.info(case.zone), start, end) if one > case.start][: len(mine)] != mine:
        return None  # the engine is wrong
    for at in _transitions(case.zone):
        if at - 3 * HOUR <= first <= at + 26 * HOUR:
            moved = oracle.offset(oracle.info(case.zone), at) - oracle.offset(
                oracle.info(case.zone), at - oracle.SECOND
            )
            what = "a missing day" if moved >= DAY else "a gap" if moved > timedelta(0) else "a fold"
            return f"another rule at {what} ({'extra' if first in theirs else 'left out'})"
    fields = case.text.split()[-5:]
    if _starred(fields) and _reads(spec, case, theirs, both=False):
        return "a starred day field does not make it AND"
    if _starred(fields) and _reads(spec, case, theirs, both=True):
        return "day-of-month and day-of-week must both match, although neither is starred"
    if "#" in fields[4] and _reads(oracle.Cron(" ".join([*fields[:2], "*", *fields[3:]])), case, theirs, both=True):
        return "with # the day-of-month field is ignored"
    if "W" in fields[2]:
        return "nW in a month without that day is clamped, or nW with weekdays is read otherwise"
    return None


def _reads(spec: oracle.Cron, case: Case, theirs: list[datetime], *, both: bool) -> bool:
    """Return whether their result is that of AND, or OR, of the day fields."""
    info = oracle.info(case.zone)

    def names_day(day: date) -> bool:
        dates, weekdays = spec.fields[3], spec.fields[5]
        by_date = any(oracle.names_date(item, day) for item in dates.split(","))
        by_weekday = any(oracle.names_weekday(item, day) for item in weekdays.split(","))
        return day.month in spec.months and (by_date and by_weekday if both else by_date or by_weekday)

    spec.day = names_day  # type: ignore[method-assign]
    low, high = (at.astimezone(info).date() for at in (case.start, theirs[-1]))
    found = [one for one in spec.fires(info, low - DAY, high + 2 * DAY) if one > case.start]
    return found[: len(theirs)] == theirs


def cronsim(text: str, zone: str, start: datetime) -> list[datetime]:
    from cronsim import CronSim

    return [at.astimezone(UTC) for at in islice(CronSim(text, start.astimezone(oracle.info(zone))), COUNT)]


def croniter(text: str, zone: str, start: datetime) -> list[datetime]:
    from croniter import croniter as library

    walk = library(text, start.astimezone(oracle.info(zone)), second_at_beginning=True)
    return [walk.get_next(datetime).astimezone(UTC) for _ in range(COUNT)]


@contextmanager
def node() -> Iterator[dict[str, Ask]]:
    """Return cron-parser and croner, queried over a pipe; empty without Node and npm."""
    if not (shutil.which("node") and shutil.which("npm")):
        print("SKIPPED: cron-parser and croner need node and npm", file=sys.stderr)
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", *NPM]
        if subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode:
            print("SKIPPED: cron-parser and croner could not be installed", file=sys.stderr)
            yield {}
            return
        script = [shutil.which("node") or "node", str(Path(__file__).with_name("peers.mjs")), folder]
        with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

            def asking(lib: str) -> Ask:
                def ask(text: str, zone: str, start: datetime) -> list[datetime]:
                    assert process.stdin
                    assert process.stdout
                    asked = {"lib": lib, "spec": text, "tz": zone, "start": start.timestamp(), "count": COUNT}
                    print(json.dumps(asked), file=process.stdin, flush=True)
                    found = json.loads(process.stdout.readline())
                    if isinstance(found, dict):
                        raise ValueError(found["error"])
                    return [datetime.fromtimestamp(at, UTC) for at in found]

                return ask

            yield {"cron-parser": asking("cron-parser"), "croner": asking("croner")}
            assert process.stdin
            process.stdin.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential.peers", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="of each class")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    table: dict[tuple[str, str], Counter[str]] = {}
    rules: Counter[tuple[str, str]] = Counter()
    unexplained: list[str] = []
    with node() as others:
        peers: dict[str, Ask] = {"cronsim": cronsim, "croniter": croniter, **others}
        for case in generate(chosen.seed, chosen.cases):
            mine = ours(case)
            if not mine:
                continue
            for name, ask in peers.items():
                row = table.setdefault((name, case.kind), Counter())
                try:
                    theirs = ask(case.text, case.zone, case.start)[: len(mine)]
                except Exception:  # every library raises its own errors
                    row["refused"] += 1
                    continue
                row["asked"] += 1
                if theirs == mine:
                    row["same"] += 1
                elif rule := why(case, mine, theirs):
                    row["explained"] += 1
                    rules[name, f"{case.kind}: {rule}"] += 1
                else:
                    row["unexplained"] += 1
                    unexplained.append(f"{name} {case.kind}: {case.text!r} {case.zone} {case.start}: {mine} {theirs}")
    print(
        f"{'library':<12} {'class':<20} {'asked':>7} {'same':>7} {'explained':>10} {'unexplained':>12} {'refused':>8}"
    )
    for (name, kind), row in sorted(table.items()):
        print(f"{name:<12} {kind:<20} {row['asked']:>7} {row['same']:>7} {row['explained']:>10}"
              f" {row['unexplained']:>12} {row['refused']:>8}")  # fmt: skip
    print("\nWhat explains them:")
    for (name, rule), count in sorted(rules.items()):
        print(f"  {count:>5}  {name}: {rule}")
    for line in unexplained[:20]:
        print(f"UNEXPLAINED {line}")
    return 7 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
