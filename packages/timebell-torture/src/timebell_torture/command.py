"""The command `timebell torture`: a fault injection test of the guarantees."""

from __future__ import annotations

import click

from timebell.cli.output import print_data, print_message


@click.command("torture")
@click.option(
    "--minutes", type=click.FloatRange(min=0.5, max=1440), default=3.0, show_default=True, help="Total duration."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the workload and the faults.")
@click.option("--nodes", type=click.IntRange(min=1, max=9), help="Number of nodes.  [default: 3; 1 on sqlite]")
@click.option(
    "--store",
    default="postgres",
    show_default=True,
    help="postgres (starts its own server), pgbouncer, mariadb or sqlite.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=1, max=1000),
    default=20.0,
    show_default=True,
    help="Approximate occurrences per second.",
)
@click.option(
    "--faults",
    default="all",
    show_default=True,
    help="all, or a list of faults of docs/guides/torture.md: kill,freeze,dbstop,...",
)
@click.option("--out", metavar="DIR", help="Folder for ledgers and report.  [default: a new one]")
@click.option("--selftest", is_flag=True, help="Test only the checker; start nothing.")
@click.option("--check", metavar="DIR", help="Check the ledgers of an earlier run again.")
def torture(
    minutes: float,
    seed: int,
    nodes: int | None,
    store: str,
    rate: float,
    faults: str,
    out: str | None,
    selftest: bool,
    check: str | None,
) -> None:
    """Inject faults into a separate Timebell, and check the guarantees.

    Starts nodes, a database and a receiver on this machine; kills, freezes and disconnects them; and compares the
    requested runs with the received ones. Exits with 0 (VALID), 1 (INVALID) or 2 (UNKNOWN: too little was exercised).
    """
    from timebell_torture import check as checker
    from timebell_torture import run as runs

    if selftest:
        raise click.exceptions.Exit(_selftest(seed))
    if check is not None:
        summary, folder = checker.check_run(check), check
    else:
        count = nodes or (1 if store == "sqlite" else 3)
        plan = runs.create_plan(minutes, seed, count, store, rate, faults, out, print_message)
        folder = plan.out
        print_message(f"Ledgers, logs and report: {folder}")
        if missing := plan.missing_fault_seconds():
            print_message(
                f"TOO SHORT to be VALID: {plan.required_faults} faults of each of {len(plan.faults)} kinds may need"
                f" {missing:.0f} s more. Use more --minutes, or fewer --faults."
            )
        summary = runs.run(plan, print_message)
    expected = summary["expected"]
    print_data(
        f"occurrences: {expected['must']} had to fire, {expected['may']} were optional, {expected['mustnot']} were"
        f" forbidden; {summary['effects']} attempts received"
    )
    print_data(
        "faults that took effect: "
        + (", ".join(f"{kind} {number}" for kind, number in summary["faults"].items()) or "none")
    )
    for phase, row in summary["late"].items():
        print_data(
            f"lateness, {phase}: p50 {row['p50'] * 1000:.0f} ms, p99 {row['p99'] * 1000:.0f} ms,"
            f" p99.9 {row['p999'] * 1000:.0f} ms, max {row['max'] * 1000:.0f} ms ({row['count']})"
        )
    for kind, row in summary["recovery"].items():
        print_data(f"recovery, {kind}: at most {row['max']:g} s ({row['count']})")
    print_data(f"total CPU starvation of nodes: {summary['starved']:g} s")
    print_data(f"repeated deliveries explained by a fault: {summary['justified']}")
    if audit := summary["audited"]:
        print_data(
            f"timebell audit: {audit['differences']} differences;"
            f" {audit['fired']} occurrences of schedules started, {audit['seen']} received"
        )
    for name, number in summary["failed"].items():
        print_data(f"{name}: {number}")
    for shortfall in summary["why"]:
        print_data(f"insufficient: {shortfall}")
    print_data(f"repeat with: {summary['again']}")
    print_data(f"report: {folder}/report.html")
    print_data(summary["verdict"])
    raise click.exceptions.Exit({"VALID": 0, "INVALID": 1, "UNKNOWN": 2}[summary["verdict"]])


def _selftest(seed: int) -> int:
    from timebell_torture import selftest as tests

    result = tests.run(seed, seeds_per_class=20)
    for name, seeded in result.seeded.items():
        print_data(f"{name}: {result.found[name]} of {seeded} seeded violations found")
    print_data(f"false alarms on {result.histories} clean histories: {len(result.alarms)}")
    for alarm in result.alarms[:10]:
        print_data(alarm)
    print_data("VALID" if result.passed else "INVALID")
    return 0 if result.passed else 1
