"""The checker process: it reads the ledgers of a run, and writes the verdict and the report. It can be repeated."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from timebell.errors import InvalidInput
from timebell.settings import package_version
from timebell_torture import report
from timebell_torture.history import NODE_FAULTS, STORE_FAULTS, History
from timebell_torture.ledger import read_ledger
from timebell_torture.plan import Plan, load_plan, write_json
from timebell_torture.rules import HistoryChecker
from timebell_torture.verdict import VIOLATION_CLASSES, Verdict

MAX_CPU_SHARE = 0.8  # of one CPU
MAX_STALLED_SHARE = 0.1  # of the duration of the run
NEAR_DUE_SECONDS = 0.2
PROCESS_NAMES = {"driver": "driver", "sink": "receiver"}  # by their names in the field `usage` of verdict.json


def load_history(plan: Plan) -> History:
    """Load the files of a run, without occurrences that were due, and arrived, after its end."""
    names = ("intent", "effect", "fault", "record")
    intents, effects, faults, records = (read_ledger(plan.path(f"{name}.jsonl")) for name in names)
    last_due_us = (plan.began_wall + plan.ended - plan.began) / 1000
    due_after_end = {
        line["seq"] for line in effects
        if line["what"] == "recv" and line["due_us"] > last_due_us and line["wall"] / 1000 >= line["due_us"]
    }  # fmt: skip
    effects = [line for line in effects if line.get("seq") not in due_after_end]
    due_later = {line["key"] for line in records if line.get("due_us", 0) > last_due_us}
    records = [line for line in records if line.get("key") not in due_later]
    return History(asdict(plan), intents, effects, faults, records)


def find_shortfalls(plan: Plan, history: History, check: HistoryChecker) -> list[str]:
    """Return the reasons why too little was exercised for a verdict, if any.

    The minimums apply to 10 minutes. A shorter run needs its share of them, and a run of half an hour on a server
    needs far more occurrences.
    """
    share = plan.share
    required = sum(item.requirement == "must" for item in check.expected.values())
    operations = [(entity, operation) for entity in history.entities.values() for operation in entity.operations]
    unknown_outcomes = sum(operation.is_unknown for _, operation in operations)
    cancels_near_due = sum(
        operation.name == "cancel"
        and operation.type != "fail"
        and abs(operation.invoked_at - history.due_at(entity.value["due_us"])) <= NEAR_DUE_SECONDS
        for entity, operation in operations
    )
    shortfalls = []
    min_occurrences = 100_000 if plan.minutes >= 30 and plan.store != "sqlite" else 5000 * share
    minimums: list[tuple[str, float, float]] = [("occurrences that had to fire", required, min_occurrences)]
    minimums += [("cancels within 200 ms of due", cancels_near_due, 200 * share)]
    if plan.store != "sqlite" and {"cut", "dbstop"} & set(plan.faults):
        minimums += [("operations of unknown outcome", unknown_outcomes, 50 * share)]
    canaries = sum(
        item.requirement == "must" and bool(item.entity.value.get("canary")) for item in check.expected.values()
    )
    minimums += [("canaries that had to fire", canaries, 3), ("audits", len(history.audits), 1)]
    due_times = [item.due for item in check.expected.values() if item.requirement != "mustnot"]
    for kind in plan.faults:
        verified = [item for item in history.faults if item.kind == kind and item.verified]
        affected = sum(any(item.start <= at <= item.end for item in verified) for at in due_times)
        minimums += [(f"faults of kind {kind} that took effect", len(verified), plan.required_faults)]
        minimums += [(f"instants due during {kind}", affected, 50 * share)]
    for policy in ("overlap", "catch_up"):
        values = [entity.value[policy] for entity in history.entities.values() if not entity.once]
        for policy_value in sorted(set(values)):
            minimums += [(f"schedules with {policy} {policy_value}", values.count(policy_value), len(values) * 0.1)]
    shortfalls += [
        f"{count:g} {subject}, at least {minimum:.0f} required"
        for subject, count, minimum in minimums
        if count < minimum
    ]
    shortfalls += [
        f"the {PROCESS_NAMES[name]} was too busy: {cpu_share:.0%}"
        for name, cpu_share in history.usage.items()
        if cpu_share > MAX_CPU_SHARE
    ]
    shortfalls += [
        f"the node {item.target} ended without a fault, with exit code {item.detail}"
        for item in history.unexpected_exits
    ]
    stalls = sum(item.end - item.start for item in history.faults if item.kind == "stall")
    waited = sum(float(item.detail) for item in history.cpu_waits) / len(plan.nodes)
    if waited > MAX_STALLED_SHARE * plan.minutes * 60:
        shortfalls.append(f"each node waited for a CPU for {waited:.0f} s")
    if stalls > MAX_STALLED_SHARE * plan.minutes * 60:
        shortfalls.append(f"this machine was suspended or stalled for {stalls:.0f} s")
    return shortfalls


def percentile(values: list[float], fraction: float) -> float:
    """Return a percentile of lateness values, in seconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0


def summarize(plan: Plan, history: History, check: HistoryChecker, verdict: Verdict) -> dict[str, Any]:
    """Return all results of a run as JSON."""
    shortfalls = find_shortfalls(plan, history, check)
    failed = {name: verdict.counts[name] for name in VIOLATION_CLASSES if verdict.counts[name]}
    faulted = sum(
        bool(history.faults_between(item.due, item.due + 1, *NODE_FAULTS, *STORE_FAULTS))
        for item in check.expected.values()
    )
    return {
        "verdict": "INVALID" if failed else "UNKNOWN" if shortfalls else "VALID",
        "failed": failed, "why": shortfalls,
        "expected": {word: sum(item.requirement == word for item in check.expected.values())
                     for word in ("must", "may", "mustnot")},
        "effects": len(history.effects), "operations": sum(len(item.operations) for item in history.entities.values()),
        "justified": verdict.justified, "zombies": verdict.counts["zombie"], "faulted": faulted,
        "late": {
            phase: {"count": len(values)} | {
                name: round(percentile(values, fraction), 4)
                for name, fraction in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))
            } for phase, values in verdict.lateness.items()
        },
        "recovery": {kind: {"count": len(values), "max": round(max(values), 2)}
                     for kind, values in verdict.recovery.items()},
        "faults": {kind: sum(item.kind == kind and item.verified for item in history.faults)
                   for kind in sorted({item.kind for item in history.faults})},
        "starved": round(sum(float(item.detail) for item in history.cpu_waits), 2),
        "usage": history.usage, "audited": verdict.audit_counts,
        "violations": [asdict(item) for item in verdict.violations[:500]],
        "again": f"timebell torture --minutes {plan.minutes:g} --seed {plan.seed} --nodes {len(plan.nodes)} --store"
                 f" {plan.store} --rate {plan.rate:g} --faults {','.join(plan.faults)}  # {package_version()}"
                 f" {plan.commit}".rstrip(),
    }  # fmt: skip


async def main(plan: Plan) -> None:
    """Write verdict.json and report.html."""
    check_run(plan.out)


def check_run(out: str) -> dict[str, Any]:
    """Check the files of a run, write the verdict and the report, and return the summary.

    Raises InvalidInput (INVALID_TORTURE) if the folder has none.
    """
    if not Path(out, "plan.json").exists():
        raise InvalidInput(
            f"{out} does not contain the ledgers of a run.",
            code="INVALID_TORTURE",
            fix="Use the folder that `timebell torture` printed.",
        )
    plan = load_plan(out)
    history = load_history(plan)
    check = HistoryChecker(history)
    verdict = check.verdict()
    facts = summarize(plan, history, check, verdict)
    write_json(plan.path("verdict.json"), facts)
    Path(out, "report.html").write_text(report.render_report(plan, history, verdict, facts))
    return facts
