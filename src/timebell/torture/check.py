"""The checker's process: files in, a verdict and a page out. It can be run again on the same files at any time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from timebell.errors import InvalidInput
from timebell.settings import package_version
from timebell.torture import report
from timebell.torture.history import NODE_FAULTS, STORE_FAULTS, History
from timebell.torture.ledgers import read
from timebell.torture.plan import Plan, load, write
from timebell.torture.verdict import CLASSES, Verdict
from timebell.torture.verdicts import Check

BUSY = 0.8  # of one processor
STALLED = 0.1  # of the time
NEAR = 0.2  # seconds around a due instant


def history_of(plan: Plan) -> History:
    """From the files of a run; what is due after its end, and came after it, is left out."""
    names = ("intent", "effect", "fault", "record")
    intents, effects, faults, records = (read(plan.path(f"{name}.jsonl")) for name in names)
    last = (plan.began_wall + plan.ended - plan.began) / 1000
    late = {
        line["seq"] for line in effects
        if line["what"] == "recv" and line["due_us"] > last and line["wall"] / 1000 >= line["due_us"]
    }  # fmt: skip
    effects = [line for line in effects if line.get("seq") not in late]
    gone = {line["key"] for line in records if line.get("due_us", 0) > last}
    records = [line for line in records if line.get("key") not in gone]
    return History(asdict(plan), intents, effects, faults, records)


def wanting(plan: Plan, history: History, check: Check) -> list[str]:
    """Why this run says nothing, if it does not. The figures are for 10 minutes; a shorter run has to show its part,
    and one of half an hour on servers far more occurrences."""
    part = min(1.0, plan.minutes / 10)
    musts = sum(one.word == "must" for one in check.expected.values())
    steps = [(thing, step) for thing in history.things.values() for step in thing.steps]
    infos = sum(step.type == "info" for _, step in steps)
    near = sum(
        step.f == "cancel" and step.type != "fail" and abs(step.invoked - history.due(thing.value["due_us"])) <= NEAR
        for thing, step in steps
    )
    said = []
    many = 100_000 if plan.minutes >= 30 and plan.store != "sqlite" else 5000 * part
    wanted: list[tuple[str, float, float]] = [("occurrences that had to fire", musts, many)]
    wanted += [("cancels within 200 ms of due", near, 200 * part)]
    if plan.store != "sqlite" and {"cut", "dbstop"} & set(plan.faults):
        wanted += [("operations of unknown outcome", infos, 50 * part)]
    canaries = sum(one.word == "must" and bool(one.thing.value.get("canary")) for one in check.expected.values())
    wanted += [("canaries that had to fire", canaries, 3), ("audits", len(history.audits), 1)]
    due = [one.due for one in check.expected.values() if one.word != "mustnot"]
    for kind in plan.faults:
        verified = [one for one in history.faults if one.kind == kind and one.verified]
        touched = sum(any(one.start <= at <= one.end for one in verified) for at in due)
        wanted += [(f"faults of kind {kind} that bit", len(verified), max(1, 5 * part))]
        wanted += [(f"instants due during {kind}", touched, 50 * part)]
    for policy in ("overlap", "catch_up"):
        values = [thing.value[policy] for thing in history.things.values() if not thing.once]
        for word in sorted(set(values)):
            wanted += [(f"schedules with {policy} {word}", values.count(word), len(values) * 0.1)]
    said += [f"{have:g} {what}, {need:.0f} are needed" for what, have, need in wanted if have < need]
    said += [f"the {who} was too busy: {share:.0%}" for who, share in history.usage.items() if share > BUSY]
    said += [f"the node {one.target} ended by itself, with {one.detail}" for one in history.ended]
    stalls = sum(one.end - one.start for one in history.faults if one.kind == "stall")
    waited = sum(float(one.detail) for one in history.waits) / len(plan.nodes)
    if waited > STALLED * plan.minutes * 60:
        said.append(f"each node waited for a processor for {waited:.0f} s")
    if stalls > STALLED * plan.minutes * 60:
        said.append(f"this machine stood still for {stalls:.0f} s")
    return said


def percentile(values: list[float], share: float) -> float:
    """Of lateness, in seconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(plan: Plan, history: History, check: Check, verdict: Verdict) -> dict[str, Any]:
    """Everything that is said about a run, as JSON."""
    why = wanting(plan, history, check)
    failed = {name: verdict.counts[name] for name in CLASSES if verdict.counts[name]}
    faulted = sum(
        bool(history.touching(one.due, one.due + 1, *NODE_FAULTS, *STORE_FAULTS)) for one in check.expected.values()
    )
    return {
        "verdict": "INVALID" if failed else "UNKNOWN" if why else "VALID",
        "failed": failed, "why": why,
        "expected": {word: sum(one.word == word for one in check.expected.values())
                     for word in ("must", "may", "mustnot")},
        "effects": len(history.effects), "operations": sum(len(one.steps) for one in history.things.values()),
        "justified": verdict.justified, "zombies": verdict.counts["zombie"], "faulted": faulted,
        "late": {
            phase: {"count": len(found)} | {
                name: round(percentile(found, share), 4)
                for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))
            } for phase, found in verdict.late.items()
        },
        "recovery": {kind: {"count": len(found), "max": round(max(found), 2)}
                     for kind, found in verdict.recovery.items()},
        "faults": {kind: sum(one.kind == kind and one.verified for one in history.faults)
                   for kind in sorted({one.kind for one in history.faults})},
        "starved": round(sum(float(one.detail) for one in history.waits), 2),
        "usage": history.usage, "audited": verdict.audited,
        "violations": [asdict(one) for one in verdict.violations[:500]],
        "again": f"timebell torture --minutes {plan.minutes:g} --seed {plan.seed} --nodes {len(plan.nodes)} --store"
                 f" {plan.store} --rate {plan.rate:g} --faults {','.join(plan.faults)}  # {package_version()}"
                 f" {plan.commit}".rstrip(),
    }  # fmt: skip


async def main(plan: Plan) -> None:
    """Write verdict.json and report.html."""
    look(plan.out)


def look(out: str) -> dict[str, Any]:
    """The verdict on a run's files. Raises InvalidInput (TORTURE_INVALID) where there are none."""
    if not Path(out, "plan.json").exists():
        raise InvalidInput(
            f"{out} is no folder of a run.", code="TORTURE_INVALID", fix="Give the one that `timebell torture` named."
        )
    plan = load(out)
    history = history_of(plan)
    check = Check(history)
    verdict = check.verdict()
    said = summary(plan, history, check, verdict)
    write(plan.path("verdict.json"), said)
    Path(out, "report.html").write_text(report.page(plan, history, verdict, said))
    return said
