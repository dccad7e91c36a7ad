"""`timebell torture`: the fault test of the guarantees."""

from __future__ import annotations

from typing import Annotated

from timebell.cli import click_signatures
from timebell.cli.output import say, show


def torture(
    minutes: Annotated[float, click_signatures.Option(min=0.5, max=1440, help="How long in all.")] = 3.0,
    seed: Annotated[int, click_signatures.Option(help="Of what is asked and what is broken.")] = 1,
    nodes: Annotated[
        int | None, click_signatures.Option(min=1, max=9, help="How many.  [default: 3, on sqlite 1]")
    ] = None,
    store: Annotated[
        str, click_signatures.Option(help="postgres (one of its own is started), pgbouncer, mariadb or sqlite.")
    ] = "postgres",
    rate: Annotated[float, click_signatures.Option(min=1, max=1000, help="About so many occurrences a second.")] = 20.0,
    faults: Annotated[
        str, click_signatures.Option(help="all, or some of those in docs/guides/torture.md: kill,freeze,dbstop,...")
    ] = "all",
    out: Annotated[
        str | None, click_signatures.Option(metavar="DIR", help="For ledgers and report.  [default: a new one]")
    ] = None,
    selftest: Annotated[
        bool, click_signatures.Option("--selftest", help="Test the checker instead: nothing is started.")
    ] = False,
    check: Annotated[
        str | None, click_signatures.Option(metavar="DIR", help="Judge the ledgers of an earlier run again.")
    ] = None,
) -> None:
    """Break a Timebell of its own, and check what it promised.

    Starts nodes, a database and a receiver on this machine; kills, freezes and cuts them off; and compares what was
    asked with what arrived. Ends with 0 (VALID), 1 (INVALID) or 2 (UNKNOWN: too little was tried).
    """
    from timebell.torture import check as checker
    from timebell.torture import run as runs

    if selftest:
        raise click_signatures.Exit(_selftest(seed))
    if check is not None:
        found, folder = checker.look(check), check
    else:
        count = nodes or (1 if store == "sqlite" else 3)
        plan = runs.plan_of(minutes, seed, count, store, rate, faults, out, say)
        folder = plan.out
        say(f"Ledgers, logs and report: {folder}")
        found = runs.run(plan, say)
    facts = found["expected"]
    show(f"{facts['must']} occurrences had to fire, {facts['may']} might, {facts['mustnot']} must not;"
         f" {found['effects']} attempts arrived")  # fmt: skip
    show("faults that bit: " + (", ".join(f"{kind} {n}" for kind, n in found["faults"].items()) or "none"))
    for phase, row in found["late"].items():
        show(f"late, {phase}: p50 {row['p50'] * 1000:.0f} ms, p99 {row['p99'] * 1000:.0f} ms,"
             f" p99.9 {row['p999'] * 1000:.0f} ms, most {row['max'] * 1000:.0f} ms ({row['count']})")  # fmt: skip
    for kind, row in found["recovery"].items():
        show(f"recovery, {kind}: at most {row['max']:g} s ({row['count']})")
    show(f"nodes waited for a processor, all in all: {found['starved']:g} s")
    show(f"second deliveries with a fault to explain them: {found['justified']}")
    if audit := found["audited"]:
        show(f"timebell audit: {audit['differences']} differences; {audit['fired']} occurrences of schedules started,"
             f" {audit['seen']} seen")  # fmt: skip
    for name, number in found["failed"].items():
        show(f"{name}: {number}")
    for why in found["why"]:
        show(f"too little: {why}")
    show(f"again: {found['again']}")
    show(f"report: {folder}/report.html")
    show(found["verdict"])
    raise click_signatures.Exit({"VALID": 0, "INVALID": 1, "UNKNOWN": 2}[found["verdict"]])


def _selftest(seed: int) -> int:
    from timebell.torture import selftest as tests

    result = tests.run(seed, plantings=20)
    for name, planted in result.planted.items():
        show(f"{name}: {result.found[name]} of {planted} planted")
    show(f"alarms on {result.histories} clean histories: {len(result.alarms)}")
    for alarm in result.alarms[:10]:
        show(alarm)
    show("VALID" if result.passed else "INVALID")
    return 0 if result.passed else 1
