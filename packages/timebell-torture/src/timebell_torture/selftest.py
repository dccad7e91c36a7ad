"""A test of the checker: it must find each seeded violation, and report nothing about clean histories."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random
from typing import Any

from timebell_torture import synthetic
from timebell_torture.history import INFINITY, Effect, History
from timebell_torture.rules import OUTAGE_FAULTS, HistoryChecker, check_history
from timebell_torture.synthetic import Ledgers
from timebell_torture.verdict import VIOLATION_CLASSES

NANOSECONDS = 10**9


@dataclass
class SelfTest:
    """The result: the number of seeded and found violations of each class, and false alarms on clean histories."""

    seeded: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    histories: int = 0
    alarms: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return (
            not self.alarms and self.seeded == self.found and all(self.seeded.get(name) for name in VIOLATION_CLASSES)
        )


def run(seed: int, seeds_per_class: int = 5, histories: int = 100) -> SelfTest:
    """Seed each class this many times, and check this many clean histories."""
    result = SelfTest(histories=histories)
    for number in range(histories):
        verdict = check_history(to_history(synthetic.clean_ledgers(Random(f"{seed}/clean/{number}"))))
        result.alarms += [f"history {number}: {violation}" for violation in verdict.violations]
    for name in VIOLATION_CLASSES:
        result.seeded[name] = result.found[name] = 0
        for number in count():
            if result.seeded[name] == seeds_per_class or number == seeds_per_class * 20:
                break
            rng = Random(f"{seed}/{name}/{number}")
            ledgers = synthetic.clean_ledgers(rng)
            if SEEDERS[name](HistoryEditor(ledgers, rng)):
                result.seeded[name] += 1
                result.found[name] += check_history(to_history(ledgers)).counts[name] > 0
    return result


def to_history(ledgers: Ledgers) -> History:
    """Return the history of ledgers, as if they were read from files."""
    copied = copy.deepcopy(ledgers)
    copied.effects.sort(key=lambda line: int(line["mono"]))
    return History(copied.plan, copied.intents, copied.effects, copied.faults, copied.records)


class HistoryEditor:
    """A clean history, and the parts of it that violations can be seeded into."""

    def __init__(self, ledgers: Ledgers, rng: Random) -> None:
        self.ledgers, self.rng = ledgers, rng
        self.history = to_history(ledgers)
        self.check = HistoryChecker(self.history)

    def undisturbed_effects(self, *, serial: bool | None = None) -> Iterator[Effect]:
        """Yield required effects, each the only one of its occurrence and far from every fault."""
        effects_found = []
        for occurrence, expectation in self.check.expected.items():
            effects = self.history.by_occurrence.get(occurrence, [])
            undisturbed = not self.history.faults_between(
                expectation.due - 25, expectation.due + 25, *OUTAGE_FAULTS
            ) and not self.history.clock_uncertainty(expectation.due)
            if (
                expectation.requirement == "must"
                and len(effects) == 1
                and undisturbed
                and expectation.due < 95
                and serial in (None, expectation.entity.serial)
            ):
                effects_found.append(effects[0])
        self.rng.shuffle(effects_found)
        return iter(effects_found)

    def line(self, seq: int, what: str = "recv") -> dict[str, Any]:
        """Return the ledger line of an effect."""
        return next(line for line in self.ledgers.effects if line["seq"] == seq and line["what"] == what)

    def repeat_effect(self, effect: Effect, after: float, **changes: Any) -> dict[str, Any]:
        """Add a copy of an effect, `after` seconds later, and return its line."""
        seq = 1 + max(line["seq"] for line in self.ledgers.effects)
        delay_ns = int(after * NANOSECONDS)
        recv, reply = (self.line(effect.seq, what) for what in ("recv", "reply"))
        changed = {"mono": recv["mono"] + delay_ns, "wall": recv["wall"] + delay_ns, "attempt": recv["attempt"] + 1}
        self.ledgers.effects.append(recv | {"seq": seq} | changed | changes)
        self.ledgers.effects.append(reply | {"seq": seq, "mono": reply["mono"] + delay_ns})
        return self.ledgers.effects[-2]

    def shift_effect(self, effect: Effect, seconds: float) -> None:
        """Move an effect by this many seconds."""
        delay_ns = int(seconds * NANOSECONDS)
        for line in self.ledgers.effects:
            if line["seq"] == effect.seq:
                line["mono"] += delay_ns
                if "wall" in line:
                    line["wall"] += delay_ns

    def remove_effects(self, *effects: Effect) -> None:
        """Remove effects."""
        removed = {effect.seq for effect in effects}
        self.ledgers.effects[:] = [line for line in self.ledgers.effects if line["seq"] not in removed]

    def add_forbidden_effect(self, reason: str) -> bool:
        """Add an effect for an instant that was forbidden for this reason; return whether there was one."""
        for occurrence, expectation in self.check.expected.items():
            forbidden = (
                expectation.requirement == "mustnot"
                and expectation.reason == reason
                and occurrence not in self.history.by_occurrence
            )
            template = next(iter(self.history.by_entity.get(expectation.entity.label, [])), None) or next(
                self.undisturbed_effects(), None
            )
            if forbidden and template is not None and expectation.due > 0:
                self.repeat_effect(
                    template, expectation.due - template.at + 0.05, due_us=expectation.due_us, schedule=occurrence[0],
                    once=expectation.kind == "once", key=f"{occurrence[0]}.{expectation.due_us}", attempt=1,
                    nonce=expectation.entity.value["nonce"], tenant=expectation.entity.tenant,
                )  # fmt: skip
                return True
        return False

    def consecutive_effects(self, *overlaps: str) -> Iterator[tuple[Effect, Effect]]:
        """Yield consecutive undisturbed effects of one schedule."""
        undisturbed = {effect.seq for effect in self.undisturbed_effects()}
        for label, effects in self.history.by_entity.items():
            entity = self.history.entities[label]
            if entity.value.get("overlap") in overlaps:
                for a, b in pairwise(effects):
                    if {a.seq, b.seq} <= undisturbed and a.kind == b.kind == "planned":
                        yield a, b


def _seed_undisturbed(
    change: Callable[[HistoryEditor, Effect], Any], *, serial: bool | None = None
) -> Callable[[HistoryEditor], bool]:
    def seed(editor: HistoryEditor) -> bool:
        effect = next(editor.undisturbed_effects(serial=serial), None)
        if effect is not None:
            change(editor, effect)
        return effect is not None

    return seed


def _seed_line_change(what: str = "recv", **changes: Any) -> Callable[[HistoryEditor], bool]:
    return _seed_undisturbed(lambda editor, effect: editor.line(effect.seq, what).update(changes))


def _seed_lost_unkeyed(editor: HistoryEditor) -> bool:
    """Delay an effect until a later one arrives, so that two arrive then and none in time."""
    for a, b in editor.consecutive_effects("allow"):
        if b.at - a.at > 2.5 and not editor.history.entities[a.label].serial:
            if any(effect.refused for effect in editor.history.by_entity[a.label]):
                continue
            editor.shift_effect(a, b.at - a.at + 0.01)
            return True
    return False


def _seed_overlap(editor: HistoryEditor) -> bool:
    for a, b in editor.consecutive_effects("skip", "queue"):
        editor.line(a.seq, "reply")["mono"] = editor.line(b.seq)["mono"] + 10**7
        return True
    return False


def _seed_out_of_order(editor: HistoryEditor) -> bool:
    for a, b in editor.consecutive_effects("queue"):
        editor.shift_effect(a, b.at - a.at + 0.6)
        return True
    return False


def _seed_early_retry(editor: HistoryEditor) -> bool:
    for effects in editor.history.by_occurrence.values():
        for a, b in pairwise(effects):
            if a.refused and a.ended is not None:
                editor.shift_effect(b, a.ended + 0.05 - b.at)
                return True
    return False


def _seed_duplicate(editor: HistoryEditor, effect: Effect) -> None:
    """Deliver an effect twice, in half of the cases without the end of the first attempt."""
    editor.repeat_effect(effect, 5)
    if editor.rng.random() < 0.5:
        editor.ledgers.effects.remove(editor.line(effect.seq, "reply"))


def _seed_zombie(editor: HistoryEditor, effect: Effect) -> None:
    editor.line(effect.seq)["attempt"] = 2
    editor.repeat_effect(effect, 5, attempt=1)


def _seed_not_healed(editor: HistoryEditor) -> bool:
    if editor.rng.random() < 0.5:
        editor.remove_effects(*editor.history.by_entity["canary"])
    else:
        record = editor.rng.choice(
            [
                line
                for line in editor.ledgers.records
                if line["what"] == "job" and not line["exact"] and editor.check.is_settled(line["label"])
            ]
        )
        record["state"] = "pending"
    return True


def _seed_record_change(
    change: Callable[[list[dict[str, Any]], dict[str, Any]], None],
) -> Callable[[HistoryEditor], bool]:
    def seed(editor: HistoryEditor, effect: Effect) -> None:
        records = editor.ledgers.records
        occurrence = (effect.label, effect.due_us)
        change(
            records,
            next(
                record
                for record in records
                if record["what"] == "job" and (record["label"], record["due_us"]) == occurrence
            ),
        )

    return _seed_undisturbed(seed)


def _seed_duplicate_object(editor: HistoryEditor) -> bool:
    shots = [record for record in editor.ledgers.records if record["what"] == "job" and record["kind"] == "once"]
    editor.ledgers.records.append(editor.rng.choice(shots) | {"id": "another"})
    return True


def _seed_lost_write(editor: HistoryEditor) -> bool:
    labels = [record["label"] for record in editor.ledgers.records if record.get("label", "").startswith("shot")]
    label = editor.rng.choice(
        [each for each in labels if editor.history.entities[each].touched_by_rewind(editor.history) == INFINITY]
    )
    editor.ledgers.records[:] = [record for record in editor.ledgers.records if record.get("label") != label]
    return True


def _seed_wrong_rows(editor: HistoryEditor) -> bool:
    rows = [record for record in editor.ledgers.records if record["what"] == "row"]
    row = editor.rng.choice(rows)
    if editor.rng.random() < 0.5:
        editor.ledgers.records.remove(row)
    else:
        editor.ledgers.records.append(dict(row))
    return True


def _seed_audit_difference(editor: HistoryEditor) -> bool:
    audit = next(record for record in editor.ledgers.records if record["what"] == "audit")
    if editor.rng.random() < 0.5:
        audit["fired"] = editor.check.count_arrived(audit["from_us"], audit["to_us"]) - 1
    else:
        audit["differences"] = [{"schedule": "each-1", "finding": "missing", "at": "then", "detail": "no row"}]
    return True


def _seed_wrong_loss_report(editor: HistoryEditor) -> bool:
    """Remove the report of a loss, report too little, or report a loss where there was none."""
    report = next(record for record in editor.ledgers.records if record["what"] == "rewind")
    match editor.rng.randrange(3):
        case 0:
            editor.ledgers.records.remove(report)
        case 1:
            report["counts"]["jobs"] -= 1
        case _:
            times = {name: report[name] - 20_000_000 for name in ("from_us", "until_us")}
            editor.ledgers.records.append(report | times)
    return True


def _seed_server_error(editor: HistoryEditor) -> bool:
    answered = next(line for line in editor.ledgers.intents if line["what"] == "done" and line["type"] == "ok")
    answered |= {"type": "error", "body": "500"}
    return True


def _remove_or_duplicate(records: list[dict[str, Any]], record: dict[str, Any]) -> None:
    if len(record["label"]) % 2:
        records.remove(record)
    else:
        records.append(record | {"id": "another"})


SEEDERS: dict[str, Callable[[HistoryEditor], bool]] = {
    "lost": _seed_undisturbed(lambda editor, effect: editor.remove_effects(effect)),
    "lost-unkeyed": _seed_lost_unkeyed,
    "early": _seed_undisturbed(
        lambda editor, effect: editor.shift_effect(effect, editor.history.due_at(effect.due_us) - effect.at - 0.005)
    ),
    "late": _seed_undisturbed(lambda editor, effect: editor.shift_effect(effect, 3), serial=False),
    "dup-unjustified": _seed_undisturbed(_seed_duplicate),
    "zombie-send": _seed_undisturbed(_seed_zombie),
    "attempt-order": _seed_undisturbed(lambda editor, effect: editor.repeat_effect(effect, 4, attempt=effect.attempt)),
    "key-unstable": _seed_undisturbed(
        lambda editor, effect: editor.repeat_effect(effect, 4, key=f"{effect.key}.other")
    ),
    "key-reused": _seed_undisturbed(
        lambda editor, effect: editor.line(effect.seq).update(key=next(editor.consecutive_effects("allow"))[1].key)
    ),
    "phantom": _seed_undisturbed(
        lambda editor, effect: editor.repeat_effect(effect, 2, due_us=effect.due_us + 500_000)
    ),
    "after-cancel": lambda editor: editor.add_forbidden_effect("after-cancel"),
    "stale-generation": lambda editor: editor.add_forbidden_effect("stale-generation"),
    "during-pause": lambda editor: editor.add_forbidden_effect("during-pause"),
    "overlap": _seed_overlap,
    "out-of-order": _seed_out_of_order,
    "retry": _seed_early_retry,
    "incomplete": _seed_undisturbed(
        lambda editor, effect: editor.ledgers.effects.remove(editor.line(effect.seq, "reply"))
    ),
    "signature": _seed_line_change(signed=False),
    "cross-tenant": _seed_line_change(tenant="elsewhere"),
    "dup-object": _seed_duplicate_object,
    "lost-write": _seed_lost_write,
    "phantom-success": _seed_line_change(plan="fail"),
    "accounting": _seed_record_change(_remove_or_duplicate),
    "transaction": _seed_wrong_rows,
    "not-healed": _seed_not_healed,
    "audit": _seed_audit_difference,
    "loss-report": _seed_wrong_loss_report,
    "server-error": _seed_server_error,
}
