"""The checker: a pure function from a history to what is wrong with it. Each class of wrong is one small rule.

The rules follow Jepsen's check of Chronos, and go further: what came too often, too early, too late, against a
cancel, an edit or a pause, out of turn, under a second key, or without a trace in the records, is told apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

from timebell.torture import expected as expectations
from timebell.torture.expected import EPSILON, LOCKS, RUN, STORE_BACK, TAKEOVER, Expected
from timebell.torture.history import NODE_FAULTS, STORE_FAULTS, Effect, History, Occurrence
from timebell.torture.sink import LONGEST, micros
from timebell.torture.verdict import Verdict, Violation
from timebell.torture.windows import match

LEASE = 15.0  # seconds
ACK = 2.0  # seconds around an effect in which a fault may have kept its end from being recorded
CLOCK = 0.001  # seconds of difference between two readings of one clock
BREAKS = (*NODE_FAULTS, *STORE_FAULTS)
HOLDS = ("freeze", "cut", "drop", "pool")  # faults in which what a node has locked stays locked for a while
SUSPENDS = ("freeze", "cut", "drop")  # faults after which a node goes on with what it has begun
QUEUED = 90  # runs that wait for each other, of the 100 that may: some end while others come
COLD = 3.0  # seconds that a node which has just come may take for its first batch


class Check:
    """One look at a history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.expected = expectations.expect(history)
        self.found = Verdict()
        self._by_then: dict[int, float] = {}
        """Of what was asked about: when the end of an attempt is in the database."""
        self.records: dict[Occurrence, list[dict[str, object]]] = defaultdict(list)
        self.ranges: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for record in map(dict, history.records):
            if record["what"] == "job":
                self.records[record["label"], record["kind"], record["due_us"]].append(record)
                if record["skipped"] > 1:
                    self.ranges[record["label"]].append((record["due_us"], record["to_us"], record["reason"]))

    def verdict(self) -> Verdict:
        """Every rule, once."""
        rules: list[Callable[[], None]] = [
            self._occurrences, self._effects, self._keys, self._turns, self._unkeyed, self._accounting,
            self._objects, self._transactions, self._healed, self._audited,
        ]  # fmt: skip
        for rule in rules:
            rule()
        self.found.counts.update(violation.name for violation in self.found.violations)
        return self.found

    def _say(self, name: str, label: str, at: float, detail: str = "") -> None:
        self.found.violations.append(Violation(name, label, at, detail))

    def _occurrences(self) -> None:
        for key, one in self.expected.items():
            effects = self.history.by_occurrence.get(key, [])
            good = next((effect for effect in effects if effect.ok), None)
            if one.word == "must" and not self._excused(one):
                fired = good is not None
                self.found.targets.append((one.thing.label, one.due, fired))
                if not fired:
                    self._say("lost", key[0], one.due, f"{len(effects)} attempts, none of which succeeded")
            if one.word == "mustnot" and effects:
                self._say(one.why, key[0], one.due, f"arrived at {effects[0].at:.3f}")
            if one.attempts is not None and any(effect.attempt > one.attempts for effect in effects):
                self._say("after-cancel", key[0], one.due, f"a further attempt than the {one.attempts} of the cancel")
            if effects and one.word == "must":
                self._lateness(one, effects)
            self._attempts(one, effects)

    def _excused(self, one: Expected) -> bool:
        """Whether a policy says why it did not fire, and what was seen agrees."""
        states = [(record["state"], record["reason"]) for record in self.records.get(one.occurrence, [])]
        states += [
            ("skipped", reason) for a, b, reason in self.ranges[one.thing.label]
            if a <= one.due_us <= b and one.kind == "planned"
        ]  # fmt: skip
        if len(states) != 1 or states[0][0] != "skipped":
            return False
        reason, value = states[0][1], one.thing.value
        if reason == "overlap" and value.get("overlap") == "queue":
            return self._queued(one) >= QUEUED
        if reason == "overlap":
            return value.get("overlap") == "skip" and self._busy(one)
        missed_after = value.get("missed_after", 60.0)
        late = one.due + missed_after + EPSILON
        broken = self.history.touching(one.due, late, *BREAKS, "dbclock", "stall") or (
            self.history.down.able(one.due, late) < late - one.due  # the only node had left in good order
        )
        if reason in ("missed", "coalesced"):
            return bool(broken) and value.get("catch_up") == ("latest" if reason == "coalesced" else "skip")
        return False

    def _queued(self, one: Expected) -> int:
        """How many runs of the schedule were due before, and came, or came again, later: they were live by then."""
        return sum(due_us < one.due_us and last > one.due for _, due_us, last in self.history.lasts[one.thing.label])

    def _busy(self, one: Expected) -> bool:
        """Whether an earlier run of the schedule may have been live when this one was due, or decided on."""
        first, last = sorted((one.due, self.history.true(one.due_us)))  # a node may not know yet that a clock was set
        for effect in self.history.by_thing[one.thing.label]:
            if effect.occurrence == one.occurrence or effect.at - EPSILON > max(one.since, last) + EPSILON:
                continue
            if effect.seq not in self._by_then:
                self._by_then[effect.seq] = self._recorded(effect)
            if self._by_then[effect.seq] >= first:
                return True
        # One before it that had not arrived yet, and did later: why, is a question of its own lateness. Or one that
        # somebody asked for before any node could decide.
        return self._queued(one) > 0 or self._asked_meanwhile(one)

    def _asked_meanwhile(self, one: Expected) -> bool:
        decided = self.history.down.deadline(one.due, EPSILON)
        return any(
            kind == "manual" and last > one.due and one.due <= self.history.due(due_us) <= decided
            for kind, due_us, last in self.history.lasts[one.thing.label]
        )

    def _recorded(self, effect: Effect) -> float:
        """When its end is in the database at the latest."""
        history = self.history
        until = (effect.ended if effect.ended is not None else effect.at) + EPSILON
        if effect.refused or effect.ended is None or not effect.delivered:
            until += EPSILON
        until = self._served(effect.at, until)
        if history.touching(effect.at - ACK, until, *BREAKS):
            until = self._served(effect.at, history.down.deadline(until, TAKEOVER) + history.unsure(until))
        if history.touching(effect.at, until, *HOLDS):  # what has not come by then waits for locks
            until = history.down.deadline(until, LOCKS)
        return until

    def _served(self, since: float, until: float) -> float:
        """The end of a stretch in which a node had a processor for so long."""
        wanted, end = until - since, until
        while end - since - self.history.starved(since, end) < wanted - CLOCK and end < until + TAKEOVER:
            end = since + wanted + self.history.starved(since, end)
        return end

    def _lateness(self, one: Expected, effects: list[Effect]) -> None:
        """First success, or first arrival where the sink itself failed the attempts before."""
        first = next((effect for effect in effects if effect.ok), effects[0])
        before = [effect for effect in effects if effect.at < first.at]
        if any(effect.refused for effect in before):
            first, before = effects[0], []
        since = self._turn(one, first)
        took = self.history.down.able(since, first.at)
        phase = next((name for name, (a, b) in self.history.phases.items() if a <= one.due < b), "recovery")
        if since <= one.since:
            self.found.late[phase].append(first.at - since)
        allowed = self._allowed(since, first) + self.history.unsure(since)
        took -= self.history.starved(since, first.at)
        if took > allowed:
            self._say("late", one.thing.label, one.due, f"{took:.3f} s of able time, allowed {allowed:g}")

    def _turn(self, one: Expected, first: Effect) -> float:
        """When its turn came: due, or the end of the last run before it where they take turns."""
        since = one.since
        if one.thing.serial:
            for effect in reversed(self.history.by_thing[one.thing.label]):
                if effect.at < one.since - 10 * TAKEOVER:
                    break  # it has ended long since
                if effect.at < first.at and effect.occurrence != one.occurrence:
                    ended = effect.ended or effect.at
                    if self.history.touching(effect.at - ACK, ended + ACK, *BREAKS):
                        ended = min(first.at, ended + TAKEOVER)  # its end may have been recorded by another node
                    since = max(since, ended)
        return since

    def _allowed(self, since: float, first: Effect) -> float:
        """Able seconds it may have taken, given what was broken meanwhile."""
        history, until = self.history, first.at
        nodes = history.touching(since - TAKEOVER, until, *NODE_FAULTS)
        stores = history.touching(since - STORE_BACK, until, *STORE_FAULTS)
        lost = first.attempt - 1
        if lost and (nodes or stores):
            by = since
            for _ in range(min(lost, len(nodes) + len(stores))):
                by = self._taken_over(by + RUN)
            return history.down.able(since, by)
        allowed = EPSILON + history.untold
        came = nodes if len(history.plan["nodes"]) > 1 else nodes + history.touching(since - COLD, until, "churn")
        if any(since - COLD <= fault.end <= until for fault in came):
            allowed = COLD
        if stores:
            allowed = max(allowed, STORE_BACK)
        if any(fault.kind in HOLDS for fault in nodes):
            allowed = max(allowed, LOCKS)
        # What a node claims while only the replies to it are kept from it, it has when they come.
        suspended = [
            fault.target for fault in nodes
            if fault.kind in SUSPENDS and (fault.start > since or (fault.kind != "freeze" and fault.end > since))
        ]  # fmt: skip
        if suspended and (first.node is None or first.node in suspended):
            allowed = max(allowed, TAKEOVER)  # it was begun there: it arrives when that node goes on, or by another
        return allowed

    def _taken_over(self, start: float) -> float:
        """When an attempt that was struck by then is another node's at the latest: one that has watched it all the
        while, as those that were struck themselves begin to watch anew."""
        history, found = self.history, []
        for node in history.plan["nodes"]:
            away = [one for one in history.faults if one.target == node and one.end > start]
            at = start
            for fault in away:
                if fault.start < history.down.deadline(at, TAKEOVER) and fault.end > at:
                    at = fault.end
            found.append(history.down.deadline(at, TAKEOVER))
        return min(found)

    def _attempts(self, one: Expected, effects: list[Effect]) -> None:
        for before, after in pairwise(effects):
            self._twice(before, after)
        retry = one.thing.value["retry"]
        refused = [effect for effect in effects if effect.refused and effect.delivered]
        if len(refused) > retry["attempts"]:
            self._say("retry", one.thing.label, one.due, f"{len(refused)} tries, allowed {retry['attempts']}")
        for before, after in pairwise(effects):
            ended = before.ended if before.ended is not None else before.at
            hasty = before.attempt + 1 == after.attempt and after.at - ended < retry["delay"] * 0.9
            sure = not self.history.unsure(ended)
            if before in refused and hasty and sure and before.plan != "hang" and not self._struck(before, after):
                self._say("retry", one.thing.label, one.due, f"again after {after.at - ended:.3f} s")
        last = effects[-1] if effects else None
        settled = one.word == "must" and last is not None and self.history.end - last.at > TAKEOVER + EPSILON
        if settled and all(effect.ended is None for effect in effects):
            self._say("incomplete", one.thing.label, one.due, "started and never ended")

    def _struck(self, before: Effect, after: Effect) -> bool:
        """Whether the later attempt is one of a node that took over, and did not wait for the end of the first: it came
        before that end, or when the lease was over, which a node that is back may meet by chance."""
        over = after.node != before.node and after.at > before.at + LEASE - ACK
        return (over or after.at < (before.ended or before.at)) and bool(
            self.history.touching(before.at - TAKEOVER, after.at, *BREAKS, node=before.node if over else None)
        )

    def _twice(self, before: Effect, after: Effect) -> None:
        history, until = self.history, before.ended if before.ended is not None else before.at
        # Its end may have had to wait for the locks of another that was struck, and been struck then.
        waited = LOCKS if history.touching(before.at - ACK, until + ACK, *HOLDS) else ACK
        broken = bool(history.touching(before.at - ACK, until + waited, *BREAKS, node=before.node))
        # One that the machine kept from renewing its lease is as good as frozen.
        broken = broken or history.starved(before.at - ACK, until + LEASE) > LEASE / 2
        if after.attempt == before.attempt:
            self._say("attempt-order", before.label, after.at, f"attempt {after.attempt} arrived twice")
        elif after.attempt < before.attempt:
            held = history.touching(after.at - ACK, after.at, *HOLDS, node=after.node)
            if not any(fault.start <= before.at for fault in held):  # it was not away when the other one took over
                self._say("zombie-send", before.label, after.at, f"attempt {after.attempt} after {before.attempt}")
            self.found.counts["zombie"] += 1
        # A handler that was well and never got to its end: nobody but a fault may stop it.
        cut_off = before.by in ("async", "thread") and before.plan == "ok" and before.ended is None
        if cut_off and not (broken or history.touching(before.at, before.at + RUN + ACK, *BREAKS, node=before.node)):
            self._say("dup-unjustified", before.label, after.at, f"attempt {before.attempt} was broken off, and again")
        if before.ok and not broken:
            self._say("dup-unjustified", before.label, after.at, f"attempts {before.attempt} and {after.attempt}")
        elif before.ok:
            self.found.justified += 1
        lost = before.ended is None and after.attempt > before.attempt
        for fault in history.touching(before.at - ACK, after.at, *NODE_FAULTS, node=before.node) if lost else ():
            if fault.start >= before.at:
                # Where no other node was there to watch it through, how long it took says more about the faults.
                if self._taken_over(fault.start) <= history.down.deadline(fault.start, TAKEOVER):
                    self.found.recovery["node"].append(history.down.able(fault.start, after.at))
                break

    def _effects(self) -> None:
        """What each effect says of itself."""
        triggers = {
            label: sum(step.f == "trigger" and step.type == "info" for step in thing.steps)
            for label, thing in self.history.things.items()
        }
        strangers: dict[str, set[int]] = defaultdict(set)
        for effect in self.history.effects:
            thing = self.history.things.get(effect.label)
            due = self.history.true(effect.due_us)
            early = effect.due_us / 1e6 - self.history.ahead(due) - effect.wall / 1e9
            if early > CLOCK:
                self._say("early", effect.label, effect.at, f"by {early:.4f} s")
            if not effect.signed:
                self._say("signature", effect.label, effect.at)
            if thing is None or effect.nonce != thing.value["nonce"] or effect.tenant != thing.tenant:
                self._say("cross-tenant", effect.label, effect.at, f"at {effect.tenant}")
            if effect.occurrence not in self.expected:
                strangers[effect.label].add(effect.due_us)
                manual = effect.kind == "manual" and len(strangers[effect.label]) <= triggers.get(effect.label, 0)
                if not manual:
                    self._say("phantom", effect.label, effect.at, f"due {self.history.due(effect.due_us):.3f}")

    def _keys(self) -> None:
        owners: dict[str, Occurrence] = {}
        for occurrence, effects in self.history.by_occurrence.items():
            if len({effect.key for effect in effects}) > 1:
                self._say("key-unstable", occurrence[0], effects[0].at)
            for effect in effects:
                if owners.setdefault(effect.key, occurrence) != occurrence:
                    self._say("key-reused", effect.label, effect.at, effect.key)

    def _turns(self) -> None:
        """Of schedules whose runs take turns: no two at once, and in order."""
        for label, effects in self.history.by_thing.items():
            thing = self.history.things.get(label)
            if thing is None or thing.value.get("overlap", "allow") == "allow":
                continue
            for before, after in _overlapping(effects):
                since, until = before.at - TAKEOVER, after.at + ACK
                if not any(self.history.touching(since, until, *BREAKS, node=one.node) for one in (before, after)):
                    self._say("overlap", label, after.at, f"{before.ended} is after {after.at:.3f}")
            firsts: dict[Occurrence, Effect] = {}
            for effect in effects:
                if effect.kind == "planned":
                    firsts.setdefault(effect.occurrence, effect)
            if thing.value["overlap"] == "queue":
                for before, after in pairwise(firsts.values()):
                    if after.due_us < before.due_us and not self._shuffled(before, after):
                        self._say("out-of-order", label, after.at, f"due {self.history.due(after.due_us):.3f}")

    def _shuffled(self, before: Effect, after: Effect) -> bool:
        """Whether the earlier one's first attempt may have been lost before it arrived."""
        due = self.history.due(after.due_us)
        return after.attempt > 1 and bool(self.history.touching(due - ACK, before.at + ACK, *BREAKS))

    def _unkeyed(self) -> None:
        """Again without looking at the due instant that effects claim: are there enough, in time, for all?"""
        musts: dict[str, list[Expected]] = defaultdict(list)
        for one in self.expected.values():
            if one.word == "must" and not one.thing.serial and not self._excused(one):
                musts[one.thing.label].append(one)
        for label, ones in musts.items():
            effects = self.history.by_thing[label]
            slack = 10.0 if any(effect.refused for effect in effects) else 0.0
            unsure = [self.history.unsure(one.due) for one in ones]
            true = [self.history.true(one.due_us) for one in ones]
            windows = [
                (at - self.history.ahead(at) - CLOCK, self._closes(one) + slack + more)
                for one, at, more in zip(ones, true, unsure, strict=True)
            ]
            came = [effect.at for effect in effects if effect.ok or self._cut_short(effect)]
            missing = len(windows) - match(windows, came)
            if missing:
                self._say("lost-unkeyed", label, ones[0].due, f"{missing} of {len(windows)}")

    def _cut_short(self, effect: Effect) -> bool:
        """Whether it came, and a fault of its node or of the store kept its end, or the next try, from coming: another
        attempt followed, maybe after the window."""
        return (effect.ended is None or effect.refused) and bool(
            self.history.touching(effect.at, effect.at + LONGEST + ACK, *BREAKS, node=effect.node)
        )

    def _closes(self, one: Expected) -> float:
        history, since = self.history, one.since
        if not history.touching(since - TAKEOVER, since + EPSILON, *BREAKS):
            return history.down.deadline(since, EPSILON + history.untold + history.starved(since, since + TAKEOVER))
        many = len(history.touching(since - TAKEOVER, since + 3 * TAKEOVER, *BREAKS))
        able = TAKEOVER * (1 + many) + history.starved(since, since + TAKEOVER * (1 + many))
        return history.down.deadline(since, able)

    def _accounting(self) -> None:
        """Every instant has exactly one record, and it says what the sink saw."""
        for occurrence, one in self.expected.items():
            count = len(self.records.get(occurrence, []))
            if not count and one.kind == "planned":
                count = sum(a <= one.due_us <= b for a, b, _ in self.ranges[one.thing.label])
            if count > 1 or (count == 0 and (one.word == "must" or occurrence in self.history.by_occurrence)):
                self._say("accounting", occurrence[0], one.due, f"{count} records")
        for occurrence, records in self.records.items():
            effects = self.history.by_occurrence.get(occurrence, [])
            due = self.history.due(occurrence[2])
            if occurrence not in self.expected and occurrence[1] != "manual":
                self._say("accounting", occurrence[0], due, "a record of an instant that the oracle does not know")
            states = {record["state"] for record in records}
            if "completed" in states and not any(
                effect.plan == "ok" and effect.ended is not None for effect in effects
            ):
                self._say("phantom-success", occurrence[0], due)
            if "skipped" in states and any(effect.ok for effect in effects):
                self._say("accounting", occurrence[0], due, "skipped, and the sink saw it")

    def _objects(self) -> None:
        """What was acknowledged is there, once."""
        kept = {record["label"] for record in self.history.records}
        for thing in self.history.things.values():
            created = any(step.f == "create" and step.type == "ok" for step in thing.steps)
            deleted = any(step.f == "delete" and step.type != "fail" for step in thing.steps)
            later = thing.once and self.history.due(thing.value["due_us"]) > self.history.end
            if created and not deleted and not later and thing.label not in kept:
                self._say("lost-write", thing.label, thing.steps[0].completed, "acknowledged, and not there")
        moves = {
            thing.label: sum(step.f == "update" and step.type != "fail" for step in thing.steps)
            for thing in self.history.things.values() if thing.once
        }  # fmt: skip
        ids: dict[str, set[object]] = defaultdict(set)
        for record in self.history.records:
            if record["what"] == "schedule" or (record["what"] == "job" and record["kind"] == "once"):
                ids[record["label"]].add(record["id"])
        for label, several in ids.items():
            if len(several) > 1 + min(1, moves.get(label, 0)):  # what was rescheduled once is two jobs
                self._say("dup-object", label, 0.0, f"{len(several)} objects of one request")

    def _transactions(self) -> None:
        """Rows that handlers wrote in the transaction that completed their job: one for each completed job."""
        written = Counter(record["key"] for record in self.history.records if record["what"] == "row")
        for record in self.history.records:
            if record["what"] != "job" or not record["exact"]:
                continue
            rows = written.pop(record["key"], 0)
            if rows != (record["state"] == "completed"):
                self._say("transaction", record["label"], self.history.due(record["due_us"]), f"{rows} rows")
        for key in written:
            self._say("transaction", key, 0.0, "a row of a job that is not there")

    def _healed(self) -> None:
        """When all is well again: what comes is on time, and nothing is left over."""
        for violation in list(self.found.violations):
            thing = self.history.things.get(violation.label)
            if violation.name in ("lost", "late") and thing is not None and thing.value.get("canary"):
                self._say("not-healed", violation.label, violation.at, violation.name)
        for record in self.history.records:
            if record["what"] == "job" and record["state"] in ("pending", "running"):
                due = self.history.due(record["due_us"])
                if due < self.history.end - EPSILON and self._settled(record["label"]):
                    self._say("not-healed", record["label"], due, f"still {record['state']}")
        self._store_back()

    def _audited(self) -> None:
        """What the product's own audit says: no difference, and at least as many that started as were seen."""
        for said in self.history.audits:
            for one in said["differences"]:
                if one["finding"] == "early" and self.history.unsure(self.history.true(micros(one["at"]))):
                    continue  # it began while the database's clock said otherwise
                self._say("audit", one["schedule"], 0.0, f"{one['finding']} at {one['at']}: {one['detail']}")
            seen = sum(
                kind == "planned" and said["from_us"] <= due_us < said["to_us"]
                for _, kind, due_us in self.history.by_occurrence
            )
            self.found.audited = {"fired": said["fired"], "seen": seen, "differences": len(said["differences"])}
            if said["fired"] < seen:
                self._say("audit", "all", 0.0, f"{said['fired']} started by the audit, {seen} seen")

    def _store_back(self) -> None:
        """How long it took, from each return of the database, until all that was due meanwhile had started: in time in
        which a node could have acted, as the next fault may come at once. What a client could make only later counts
        from then; what a node had taken that was then struck itself says how long that took, and counts for nothing."""
        history = self.history
        for fault in history.touching(0, history.end, *STORE_FAULTS):
            took = []
            for one in self.expected.values():
                if one.word == "must" and fault.start < one.due < fault.end and not one.thing.serial:
                    first = next(iter(history.by_occurrence.get(one.occurrence, [])), None)
                    if first is None or first.attempt > 1 or first.at < fault.end:
                        continue
                    if not history.touching(fault.end, first.at, *NODE_FAULTS, node=first.node):
                        took.append(history.down.able(max(fault.end, min(one.since, first.at)), first.at))
            if took:
                self.found.recovery["store"].append(max(took))

    def _settled(self, label: str) -> bool:
        """Whether nothing of it had to be tried again at the very end."""
        return not any(
            effect.at > self.history.end - TAKEOVER and effect.refused for effect in self.history.by_thing[label]
        )


def _overlapping(effects: list[Effect]) -> Iterator[tuple[Effect, Effect]]:
    """Pairs of different occurrences that ran at once; one that never ended has no length."""
    longest: Effect | None = None
    for effect in effects:
        running = longest is not None and longest.ended is not None and effect.at < longest.ended
        if longest is not None and running and longest.occurrence != effect.occurrence:
            yield longest, effect
        if longest is None or (effect.ended or effect.at) > (longest.ended or longest.at):
            longest = effect


def judge(history: History) -> Verdict:
    """What is wrong with a history."""
    return Check(history).verdict()
