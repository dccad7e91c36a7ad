"""The checker, checked: every violation planted once into a clean history is found, and clean ones raise no alarm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random
from typing import Any

from timebell.torture import synthetic
from timebell.torture.history import Effect, History
from timebell.torture.synthetic import Ledgers
from timebell.torture.verdict import CLASSES
from timebell.torture.verdicts import BREAKS, Check, judge

SECOND = 10**9


@dataclass
class SelfTest:
    """What it came to: of each class how many were planted and found; alarms on clean histories."""

    planted: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    histories: int = 0
    alarms: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.alarms and self.planted == self.found and all(self.planted.get(name) for name in CLASSES)


def run(seed: int, plantings: int = 5, histories: int = 100) -> SelfTest:
    """Plant each class so many times, and look at so many clean histories."""
    result = SelfTest(histories=histories)
    for number in range(histories):
        verdict = judge(read(synthetic.clean(Random(f"{seed}/clean/{number}"))))
        result.alarms += [f"history {number}: {one}" for one in verdict.violations]
    for name in CLASSES:
        result.planted[name] = result.found[name] = 0
        for number in count():
            if result.planted[name] == plantings or number == plantings * 20:
                break
            chance = Random(f"{seed}/{name}/{number}")
            ledgers = synthetic.clean(chance)
            if PLANTS[name](Bed(ledgers, chance)):
                result.planted[name] += 1
                result.found[name] += judge(read(ledgers)).counts[name] > 0
    return result


def read(ledgers: Ledgers) -> History:
    """As if from the files."""
    made = copy.deepcopy(ledgers)
    made.effects.sort(key=lambda line: int(line["mono"]))
    return History(made.plan, made.intents, made.effects, made.faults, made.records)


class Bed:
    """A history to plant into: what in it is safe to touch."""

    def __init__(self, ledgers: Ledgers, chance: Random) -> None:
        self.ledgers, self.chance = ledgers, chance
        self.history = read(ledgers)
        self.check = Check(self.history)

    def quiet(self, *, serial: bool | None = None) -> Iterator[Effect]:
        """Effects that had to be, alone of their occurrence, and far from every fault."""
        found = []
        for key, one in self.check.expected.items():
            effects = self.history.by_occurrence.get(key, [])
            calm = not self.history.touching(one.due - 25, one.due + 25, *BREAKS) and not self.history.unsure(one.due)
            if (
                one.word == "must"
                and len(effects) == 1
                and calm
                and one.due < 95
                and serial in (None, one.thing.serial)
            ):
                found.append(effects[0])
        self.chance.shuffle(found)
        return iter(found)

    def line(self, seq: int, what: str = "recv") -> dict[str, Any]:
        """The line of an effect."""
        return next(line for line in self.ledgers.effects if line["seq"] == seq and line["what"] == what)

    def again(self, effect: Effect, after: float, **changes: Any) -> dict[str, Any]:
        """The same effect once more, so many seconds later."""
        seq = 1 + max(line["seq"] for line in self.ledgers.effects)
        late = int(after * SECOND)
        recv, reply = (self.line(effect.seq, what) for what in ("recv", "reply"))
        moved = {"mono": recv["mono"] + late, "wall": recv["wall"] + late, "attempt": recv["attempt"] + 1}
        self.ledgers.effects.append(recv | {"seq": seq} | moved | changes)
        self.ledgers.effects.append(reply | {"seq": seq, "mono": reply["mono"] + late})
        return self.ledgers.effects[-2]

    def shift(self, effect: Effect, by: float) -> None:
        """Move it in time."""
        late = int(by * SECOND)
        for line in self.ledgers.effects:
            if line["seq"] == effect.seq:
                line["mono"] += late
                if "wall" in line:
                    line["wall"] += late

    def drop(self, *effects: Effect) -> None:
        """As if it had not been."""
        gone = {effect.seq for effect in effects}
        self.ledgers.effects[:] = [line for line in self.ledgers.effects if line["seq"] not in gone]

    def stray(self, why: str) -> bool:
        """An effect for an instant that something forbade."""
        for key, one in self.check.expected.items():
            forbidden = one.word == "mustnot" and one.why == why and key not in self.history.by_occurrence
            some = next(iter(self.history.by_thing.get(one.thing.label, [])), None) or next(self.quiet(), None)
            if forbidden and some is not None and one.due > 0:
                self.again(
                    some, one.due - some.at + 0.05, due_us=one.due_us, schedule=key[0], once=one.kind == "once",
                    key=f"{key[0]}.{one.due_us}", attempt=1, nonce=one.thing.value["nonce"], tenant=one.thing.tenant,
                )  # fmt: skip
                return True
        return False

    def pairs(self, *overlaps: str) -> Iterator[tuple[Effect, Effect]]:
        """Consecutive quiet effects of one schedule."""
        quiet = {effect.seq for effect in self.quiet()}
        for label, effects in self.history.by_thing.items():
            thing = self.history.things[label]
            if thing.value.get("overlap") in overlaps:
                for a, b in pairwise(effects):
                    if {a.seq, b.seq} <= quiet and a.kind == b.kind == "planned":
                        yield a, b


def _on_quiet(act: Callable[[Bed, Effect], Any], *, serial: bool | None = None) -> Callable[[Bed], bool]:
    def plant(bed: Bed) -> bool:
        effect = next(bed.quiet(serial=serial), None)
        if effect is not None:
            act(bed, effect)
        return effect is not None

    return plant


def _set(what: str = "recv", **changes: Any) -> Callable[[Bed], bool]:
    return _on_quiet(lambda bed, effect: bed.line(effect.seq, what).update(changes))


def _unkeyed(bed: Bed) -> bool:
    """One is not delivered in time, and a later one is delivered twice under both names."""
    for a, b in bed.pairs("allow"):
        if b.at - a.at > 2.5 and not bed.history.things[a.label].serial:
            if any(effect.refused for effect in bed.history.by_thing[a.label]):
                continue
            bed.shift(a, b.at - a.at + 0.01)
            return True
    return False


def _too_long(bed: Bed) -> bool:
    for a, b in bed.pairs("skip", "queue"):
        bed.line(a.seq, "reply")["mono"] = bed.line(b.seq)["mono"] + 10**7
        return True
    return False


def _swapped(bed: Bed) -> bool:
    for a, b in bed.pairs("queue"):
        bed.shift(a, b.at - a.at + 0.6)
        return True
    return False


def _hasty(bed: Bed) -> bool:
    for effects in bed.history.by_occurrence.values():
        for a, b in pairwise(effects):
            if a.refused and a.ended is not None:
                bed.shift(b, a.ended + 0.05 - b.at)
                return True
    return False


def _again(bed: Bed, effect: Effect) -> None:
    """Delivered twice; or broken off by nobody, and begun again."""
    bed.again(effect, 5)
    if bed.chance.random() < 0.5:
        bed.ledgers.effects.remove(bed.line(effect.seq, "reply"))


def _zombie(bed: Bed, effect: Effect) -> None:
    bed.line(effect.seq)["attempt"] = 2
    bed.again(effect, 5, attempt=1)


def _canary(bed: Bed) -> bool:
    if bed.chance.random() < 0.5:
        bed.drop(*bed.history.by_thing["canary"])
    else:
        record = bed.chance.choice([one for one in bed.ledgers.records if one["what"] == "job" and not one["exact"]])
        record["state"] = "pending"
    return True


def _of_record(act: Callable[[list[dict[str, Any]], dict[str, Any]], None]) -> Callable[[Bed], bool]:
    def plant(bed: Bed, effect: Effect) -> None:
        records = bed.ledgers.records
        mine = (effect.label, effect.due_us)
        act(records, next(one for one in records if one["what"] == "job" and (one["label"], one["due_us"]) == mine))

    return _on_quiet(plant)


def _doubled(bed: Bed) -> bool:
    shots = [one for one in bed.ledgers.records if one["what"] == "job" and one["kind"] == "once"]
    bed.ledgers.records.append(bed.chance.choice(shots) | {"id": "another"})
    return True


def _unwritten(bed: Bed) -> bool:
    label = bed.chance.choice([one["label"] for one in bed.ledgers.records if one.get("label", "").startswith("shot")])
    bed.ledgers.records[:] = [one for one in bed.ledgers.records if one.get("label") != label]
    return True


def _rows(bed: Bed) -> bool:
    rows = [one for one in bed.ledgers.records if one["what"] == "row"]
    row = bed.chance.choice(rows)
    if bed.chance.random() < 0.5:
        bed.ledgers.records.remove(row)
    else:
        bed.ledgers.records.append(dict(row))
    return True


def _audit(bed: Bed) -> bool:
    said = next(one for one in bed.ledgers.records if one["what"] == "audit")
    if bed.chance.random() < 0.5:
        said["fired"] -= 1
    else:
        said["differences"] = [{"schedule": "each-1", "finding": "missing", "at": "then", "detail": "no row"}]
    return True


def _accounts(records: list[dict[str, Any]], record: dict[str, Any]) -> None:
    if len(record["label"]) % 2:
        records.remove(record)
    else:
        records.append(record | {"id": "another"})


PLANTS: dict[str, Callable[[Bed], bool]] = {
    "lost": _on_quiet(lambda bed, effect: bed.drop(effect)),
    "lost-unkeyed": _unkeyed,
    "early": _on_quiet(lambda bed, effect: bed.shift(effect, bed.history.due(effect.due_us) - effect.at - 0.005)),
    "late": _on_quiet(lambda bed, effect: bed.shift(effect, 3), serial=False),
    "dup-unjustified": _on_quiet(_again),
    "zombie-send": _on_quiet(_zombie),
    "attempt-order": _on_quiet(lambda bed, effect: bed.again(effect, 4, attempt=effect.attempt)),
    "key-unstable": _on_quiet(lambda bed, effect: bed.again(effect, 4, key=f"{effect.key}.other")),
    "key-reused": _on_quiet(lambda bed, effect: bed.line(effect.seq).update(key=next(bed.pairs("allow"))[1].key)),
    "phantom": _on_quiet(lambda bed, effect: bed.again(effect, 2, due_us=effect.due_us + 500_000)),
    "after-cancel": lambda bed: bed.stray("after-cancel"),
    "stale-generation": lambda bed: bed.stray("stale-generation"),
    "during-pause": lambda bed: bed.stray("during-pause"),
    "overlap": _too_long,
    "out-of-order": _swapped,
    "retry": _hasty,
    "incomplete": _on_quiet(lambda bed, effect: bed.ledgers.effects.remove(bed.line(effect.seq, "reply"))),
    "signature": _set(signed=False),
    "cross-tenant": _set(tenant="elsewhere"),
    "dup-object": _doubled,
    "lost-write": _unwritten,
    "phantom-success": _set(plan="fail"),
    "accounting": _of_record(_accounts),
    "transaction": _rows,
    "not-healed": _canary,
    "audit": _audit,
}
