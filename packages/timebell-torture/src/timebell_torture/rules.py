"""The checker: a pure function from a history to its violations, with one small rule for each class.

The rules extend Jepsen's check of Chronos. They distinguish runs that are repeated, early, late, or out of order, that
contradict a cancel, an edit or a pause, that have a second key, or that have no record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise

from timebell_torture.expectations import (
    LOCK_RELEASE_SECONDS,
    MAX_LATENESS_SECONDS,
    MAX_RUN_SECONDS,
    STORE_RECOVERY_SECONDS,
    TAKEOVER_SECONDS,
    Expectation,
    derive_expectations,
)
from timebell_torture.history import NODE_FAULTS, STORE_FAULTS, Effect, History, Occurrence
from timebell_torture.http_client import TIMEOUT_SECONDS
from timebell_torture.receiver import MAX_HANDLER_SECONDS, to_microseconds
from timebell_torture.verdict import Verdict, Violation
from timebell_torture.windows import Window, match_points, merge

LEASE_SECONDS = 15.0
COMPLETION_WRITE_SECONDS = 2.0  # a fault this close to an effect may have prevented recording its completion
CLOCK_RESOLUTION_SECONDS = 0.001  # difference between two readings of one clock
OUTAGE_FAULTS = (*NODE_FAULTS, *STORE_FAULTS)
# Results are kept until the database is back, so an outage that is shorter than a lease repeats no attempt.
BRIEF_FAULTS = ("strand", "read-only", "promote")
LOSS_REPORT_MARGIN_SECONDS = 5.0  # of the times in a report
LOCK_HOLDING_FAULTS = ("freeze", "cut", "drop", "pool")  # the rows that a node has locked stay locked for a while
SUSPENDING_FAULTS = ("freeze", "cut", "drop")  # the node continues afterwards with the attempts that it had started
MIN_QUEUED_RUNS = 90  # of the 100 runs that a schedule may have waiting: some end while others are added
COLD_START_SECONDS = 3.0  # allowed for the first batch of a node that has just started


class HistoryChecker:
    """A check of one history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.expected = derive_expectations(history)
        self.result = Verdict()
        self._recorded_by: dict[int, float] = {}
        """Cache: the time by which the completion of an attempt is in the database, by sequence number."""
        self.records: dict[Occurrence, list[dict[str, object]]] = defaultdict(list)
        self.ranges: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for record in map(dict, history.records):
            if record["what"] == "job":
                self.records[record["label"], record["kind"], record["due_us"]].append(record)
                if record["skipped"] > 1:
                    self.ranges[record["label"]].append((record["due_us"], record["to_us"], record["reason"]))

    def verdict(self) -> Verdict:
        """Apply every rule once."""
        rules: list[Callable[[], None]] = [
            self._check_occurrences, self._check_effects, self._check_keys, self._check_serial_order,
            self._check_arrivals_without_keys, self._check_accounting, self._check_objects, self._check_transactions,
            self._check_recovery, self._check_audit, self._check_loss_reports, self._check_errors,
        ]  # fmt: skip
        for rule in rules:
            rule()
        self.result.counts.update(violation.name for violation in self.result.violations)
        return self.result

    def _add_violation(self, name: str, label: str, at: float, detail: str = "") -> None:
        self.result.violations.append(Violation(name, label, at, detail))

    def _check_occurrences(self) -> None:
        for occurrence, expectation in self.expected.items():
            effects = self.history.by_occurrence.get(occurrence, [])
            succeeded = next((effect for effect in effects if effect.ok), None)
            if expectation.requirement == "must" and not self._is_excused(expectation):
                fired = succeeded is not None
                self.result.targets.append((expectation.entity.label, expectation.due, fired))
                if not fired:
                    self._add_violation(
                        "lost", occurrence[0], expectation.due, f"{len(effects)} attempts, none of which succeeded"
                    )
            if expectation.requirement == "mustnot" and effects:
                self._add_violation(
                    expectation.reason, occurrence[0], expectation.due, f"arrived at {effects[0].at:.3f}"
                )
            if expectation.max_attempts is not None and any(
                effect.attempt > expectation.max_attempts for effect in effects
            ):
                self._add_violation(
                    "after-cancel",
                    occurrence[0],
                    expectation.due,
                    f"an attempt after attempt {expectation.max_attempts}, the last one before the cancel",
                )
            if effects and expectation.requirement == "must":
                self._check_lateness(expectation, effects)
            self._check_attempts(expectation, effects)

    def _is_excused(self, expectation: Expectation) -> bool:
        """Return whether a policy explains why an occurrence did not fire, consistently with the effects."""
        states = [(record["state"], record["reason"]) for record in self.records.get(expectation.occurrence, [])]
        states += [
            ("skipped", reason) for a, b, reason in self.ranges[expectation.entity.label]
            if a <= expectation.due_us <= b and expectation.kind == "planned"
        ]  # fmt: skip
        if len(states) != 1 or states[0][0] != "skipped":
            return False
        reason, value = states[0][1], expectation.entity.value
        if reason == "overlap" and value.get("overlap") == "queue":
            return self._earlier_live_runs(expectation) >= MIN_QUEUED_RUNS
        if reason == "overlap":
            return value.get("overlap") == "skip" and self._earlier_run_may_be_live(expectation)
        missed_after = value.get("missed_after", 60.0)
        late_limit = expectation.due + missed_after + MAX_LATENESS_SECONDS
        # The available time is also reduced if the only node had been stopped cleanly.
        affected = self.history.faults_between(expectation.due, late_limit, *OUTAGE_FAULTS, "dbclock", "stall") or (
            self.history.downtime.available_seconds(expectation.due, late_limit) < late_limit - expectation.due
        )
        if reason in ("missed", "coalesced"):
            return bool(affected) and value.get("catch_up") == ("latest" if reason == "coalesced" else "skip")
        return False

    def _earlier_live_runs(self, expectation: Expectation) -> int:
        """Count runs of the schedule that were due earlier and arrived, perhaps again, after this one was due."""
        return sum(
            due_us < expectation.due_us and last_arrival > expectation.due
            for _, due_us, last_arrival in self.history.last_arrivals[expectation.entity.label]
        )

    def _earlier_run_may_be_live(self, expectation: Expectation) -> bool:
        """Return whether an earlier run of the schedule may have been live when this one was due or decided."""
        # Both due times count, because a node may not have adopted a shifted clock yet.
        first, last = sorted((expectation.due, self.history.true_due_at(expectation.due_us)))
        for effect in self.history.by_entity[expectation.entity.label]:
            if (
                effect.occurrence == expectation.occurrence
                or effect.at - MAX_LATENESS_SECONDS > max(expectation.startable_at, last) + MAX_LATENESS_SECONDS
            ):
                continue
            if effect.seq not in self._recorded_by:
                self._recorded_by[effect.seq] = self._completion_recorded_by(effect)
            if self._recorded_by[effect.seq] >= first:
                return True
        # Also live: an earlier run that arrived only later (its lateness is checked separately), and a run that was
        # triggered before any node could decide about this one.
        return self._earlier_live_runs(expectation) > 0 or self._triggered_before_decision(expectation)

    def _triggered_before_decision(self, expectation: Expectation) -> bool:
        decision_deadline = self.history.downtime.deadline(expectation.due, MAX_LATENESS_SECONDS)
        return any(
            kind == "manual"
            and last_arrival > expectation.due
            and expectation.due <= self.history.due_at(due_us) <= decision_deadline
            for kind, due_us, last_arrival in self.history.last_arrivals[expectation.entity.label]
        )

    def _completion_recorded_by(self, effect: Effect) -> float:
        """Return the latest time at which the completion of an attempt is in the database."""
        history = self.history
        until = (effect.ended if effect.ended is not None else effect.at) + MAX_LATENESS_SECONDS
        if effect.refused or effect.ended is None or not effect.delivered:
            until += MAX_LATENESS_SECONDS
        until = self._extend_by_starvation(effect.at, until)
        if history.faults_between(effect.at - COMPLETION_WRITE_SECONDS, until, *OUTAGE_FAULTS):
            until = self._extend_by_starvation(
                effect.at, history.downtime.deadline(until, TAKEOVER_SECONDS) + history.clock_uncertainty(until)
            )
        if history.faults_between(effect.at, until, *LOCK_HOLDING_FAULTS):  # the completion may wait for locks
            until = history.downtime.deadline(until, LOCK_RELEASE_SECONDS)
        return until

    def _extend_by_starvation(self, since: float, until: float) -> float:
        """Extend an interval until a node had a CPU for its original length."""
        needed, end = until - since, until
        while (
            end - since - self.history.cpu_starvation(since, end) < needed - CLOCK_RESOLUTION_SECONDS
            and end < until + TAKEOVER_SECONDS
        ):
            end = since + needed + self.history.cpu_starvation(since, end)
        return end

    def _check_lateness(self, expectation: Expectation, effects: list[Effect]) -> None:
        """Check the first success, or the first arrival if the receiver failed earlier attempts on purpose."""
        first = next((effect for effect in effects if effect.ok), effects[0])
        earlier = [effect for effect in effects if effect.at < first.at]
        if any(effect.refused for effect in earlier):
            first, earlier = effects[0], []
        since = self._serial_start(expectation, first)
        elapsed = self.history.downtime.available_seconds(since, first.at)
        phase = next((name for name, (a, b) in self.history.phases.items() if a <= expectation.due < b), "recovery")
        if since <= expectation.startable_at:
            self.result.lateness[phase].append(first.at - since)
        allowed = self._allowed_seconds(since, first) + self.history.clock_uncertainty(since)
        elapsed -= self.history.cpu_starvation(since, first.at)
        if elapsed > allowed:
            self._add_violation(
                "late",
                expectation.entity.label,
                expectation.due,
                f"{elapsed:.3f} s of available time, allowed {allowed:g}",
            )

    def _serial_start(self, expectation: Expectation, first: Effect) -> float:
        """Return when it could start: when due, or after the previous run of a serial schedule."""
        since = expectation.startable_at
        if expectation.entity.serial:
            for effect in reversed(self.history.by_entity[expectation.entity.label]):
                if effect.at < expectation.startable_at - 10 * TAKEOVER_SECONDS:
                    break  # it ended long before
                if effect.at < first.at and effect.occurrence != expectation.occurrence:
                    ended = effect.ended or effect.at
                    if self.history.faults_between(
                        effect.at - COMPLETION_WRITE_SECONDS, ended + COMPLETION_WRITE_SECONDS, *OUTAGE_FAULTS
                    ):
                        # Another node may have recorded its end.
                        ended = min(first.at, ended + TAKEOVER_SECONDS)
                    since = max(since, ended)
        return since

    def _allowed_seconds(self, since: float, first: Effect) -> float:
        """Return the available time that a start may take, given the faults meanwhile."""
        history, until = self.history, first.at
        node_faults = history.faults_between(since - TAKEOVER_SECONDS, until, *NODE_FAULTS)
        store_faults = history.faults_between(since - STORE_RECOVERY_SECONDS, until, *STORE_FAULTS)
        lost_attempts = first.attempt - 1
        if lost_attempts and (node_faults or store_faults):
            taken_over_by = since
            for _ in range(min(lost_attempts, len(node_faults) + len(store_faults))):
                taken_over_by = self._taken_over_by(taken_over_by + MAX_RUN_SECONDS)
            allowed = history.downtime.available_seconds(since, taken_over_by)
            # All remote workers may be waiting for the responses of nodes under a fault.
            if first.by == "remote" and history.faults_between(
                taken_over_by - TIMEOUT_SECONDS, until, *SUSPENDING_FAULTS
            ):
                allowed += TIMEOUT_SECONDS
            return allowed
        allowed = MAX_LATENESS_SECONDS + history.notification_delay
        returned = (
            node_faults
            if len(history.plan["nodes"]) > 1
            else node_faults + history.faults_between(since - COLD_START_SECONDS, until, "churn")
        )
        if any(since - COLD_START_SECONDS <= fault.end <= until for fault in returned):
            allowed = COLD_START_SECONDS
        if store_faults:
            allowed = max(allowed, STORE_RECOVERY_SECONDS)
        if any(fault.kind in LOCK_HOLDING_FAULTS for fault in node_faults):
            allowed = max(allowed, LOCK_RELEASE_SECONDS)
        # A node whose replies are held may still claim jobs; it starts them when the replies arrive.
        suspended = [
            fault.target for fault in node_faults
            if fault.kind in SUSPENDING_FAULTS
            and (fault.start > since or (fault.kind != "freeze" and fault.end > since))
        ]  # fmt: skip
        if suspended and (first.node is None or first.node in suspended):
            # It was claimed there, and arrives when that node continues, or from another node.
            allowed = max(allowed, TAKEOVER_SECONDS)
        return allowed

    def _taken_over_by(self, start: float) -> float:
        """Return the latest time at which an interrupted attempt belongs to another node.

        That node must have observed the lease without interruption; a node under a fault starts from the beginning.
        """
        history, deadlines = self.history, []
        for node in history.plan["nodes"]:
            faults = [fault for fault in history.faults if fault.target == node and fault.end > start]
            at = start
            for fault in faults:
                if fault.start < history.downtime.deadline(at, TAKEOVER_SECONDS) and fault.end > at:
                    at = fault.end
            deadlines.append(history.downtime.deadline(at, TAKEOVER_SECONDS))
        return min(deadlines)

    def _check_attempts(self, expectation: Expectation, effects: list[Effect]) -> None:
        for before, after in pairwise(effects):
            self._check_repeated_attempt(before, after)
        retry = expectation.entity.value["retry"]
        refused = [effect for effect in effects if effect.refused and effect.delivered]
        if len(refused) > retry["attempts"]:
            self._add_violation(
                "retry",
                expectation.entity.label,
                expectation.due,
                f"{len(refused)} attempts, allowed {retry['attempts']}",
            )
        for before, after in pairwise(effects):
            ended = before.ended if before.ended is not None else before.at
            too_soon = before.attempt + 1 == after.attempt and after.at - ended < retry["delay"] * 0.9
            certain = not self.history.clock_uncertainty(ended)
            if (
                before in refused
                and too_soon
                and certain
                and before.plan != "hang"
                and not self._was_taken_over(before, after)
                and not self._has_forgotten_twin(before)
            ):
                self._add_violation(
                    "retry", expectation.entity.label, expectation.due, f"retried after {after.at - ended:.3f} s"
                )
        last = effects[-1] if effects else None
        settled = (
            expectation.requirement == "must"
            and last is not None
            and self.history.end - last.at > TAKEOVER_SECONDS + MAX_LATENESS_SECONDS
            and not self.history.may_be_rewound(last.at)
        )
        if settled and all(effect.ended is None for effect in effects):
            self._add_violation("incomplete", expectation.entity.label, expectation.due, "started and never ended")

    def _has_forgotten_twin(self, effect: Effect) -> bool:
        """Return whether a failover forgot an earlier attempt of the same number, whose late result then ends both."""
        return any(
            other.attempt == effect.attempt and other.at < effect.at and self.history.may_be_rewound(other.at)
            for other in self.history.by_occurrence[effect.occurrence]
        )

    def _was_taken_over(self, before: Effect, after: Effect) -> bool:
        """Return whether another node took over and started the later attempt without waiting for the end of the first.

        It then arrived before that end, or after the lease had expired (which a restarted node may reach by chance).
        """
        lease_expired = after.node != before.node and after.at > before.at + LEASE_SECONDS - COMPLETION_WRITE_SECONDS
        return (lease_expired or after.at < (before.ended or before.at)) and bool(
            self.history.faults_between(
                before.at - TAKEOVER_SECONDS, after.at, *OUTAGE_FAULTS, node=before.node if lease_expired else None
            )
        )

    @cached_property
    def _brief_outages(self) -> list[Window]:
        """The outages that are shorter than a lease, each until nodes have reconnected, as one if they overlap."""
        faults = self.history.faults_between(0, self.history.end, *BRIEF_FAULTS)
        return merge((fault.start, fault.end + STORE_RECOVERY_SECONDS) for fault in faults)

    def _outages_outlasted_lease(self, before: Effect, after: Effect) -> bool:
        """Return whether outages, one directly after another, prevented the end and the renewal of an attempt."""
        ended = before.ended if before.ended is not None else before.at
        return any(
            start - COMPLETION_WRITE_SECONDS <= ended < end
            and min(end, after.at) - max(start, before.at) >= LEASE_SECONDS
            for start, end in self._brief_outages
        )

    def _result_written_by(self, effect: Effect) -> float:
        """Return when the result of an attempt is in the database, unless its node has a fault before that."""
        history, ended = self.history, effect.ended if effect.ended is not None else effect.at
        # It may wait for locks of a node under a fault.
        waits_for_locks = history.faults_between(
            effect.at - COMPLETION_WRITE_SECONDS, ended + COMPLETION_WRITE_SECONDS, *LOCK_HOLDING_FAULTS
        )
        written_by = ended + (LOCK_RELEASE_SECONDS if waits_for_locks else COMPLETION_WRITE_SECONDS)
        written_by = self._extend_by_starvation(effect.at, written_by)
        for start, end in self._brief_outages:  # meanwhile its node keeps it
            if start <= written_by and ended < end:
                written_by = max(written_by, end)
        return written_by

    def _check_repeated_attempt(self, before: Effect, after: Effect) -> None:
        history, until = self.history, before.ended if before.ended is not None else before.at
        faults = history.faults_between(
            before.at - COMPLETION_WRITE_SECONDS, self._result_written_by(before), *OUTAGE_FAULTS, node=before.node
        )
        # The transaction of a handler cannot be kept: it ends with its connection.
        explained = any(before.by == "exact" or fault.kind not in BRIEF_FAULTS for fault in faults)
        explained = explained or self._outages_outlasted_lease(before, after)
        # A node that had no CPU to renew its lease counts as frozen.
        explained = (
            explained
            or history.cpu_starvation(before.at - COMPLETION_WRITE_SECONDS, until + LEASE_SECONDS) > LEASE_SECONDS / 2
        )
        if after.attempt <= before.attempt and history.may_be_rewound(before.at):
            self.result.justified += 1  # the database has forgotten the earlier attempt
            return
        if after.attempt == before.attempt:
            self._add_violation("attempt-order", before.label, after.at, f"attempt {after.attempt} arrived twice")
        elif after.attempt < before.attempt:
            suspensions = history.faults_between(
                after.at - COMPLETION_WRITE_SECONDS, after.at, *LOCK_HOLDING_FAULTS, node=after.node
            )
            # Allowed only if its node was suspended when the other node took over.
            if not any(fault.start <= before.at for fault in suspensions) and not self._has_forgotten_twin(after):
                self._add_violation(
                    "zombie-send", before.label, after.at, f"attempt {after.attempt} after {before.attempt}"
                )
            self.result.counts["zombie"] += 1
        # A handler that should have succeeded did not reach its end: only a fault may interrupt it.
        interrupted = before.by in ("async", "thread") and before.plan == "ok" and before.ended is None
        if interrupted and not (
            explained
            or history.faults_between(
                before.at, before.at + MAX_RUN_SECONDS + COMPLETION_WRITE_SECONDS, *OUTAGE_FAULTS, node=before.node
            )
        ):
            self._add_violation(
                "dup-unjustified", before.label, after.at, f"attempt {before.attempt} was interrupted, and repeated"
            )
        if before.ok and not explained:
            self._add_violation(
                "dup-unjustified", before.label, after.at, f"attempts {before.attempt} and {after.attempt}"
            )
        elif before.ok:
            self.result.justified += 1
        attempt_lost = before.ended is None and after.attempt > before.attempt
        for fault in (
            history.faults_between(before.at - COMPLETION_WRITE_SECONDS, after.at, *NODE_FAULTS, node=before.node)
            if attempt_lost
            else ()
        ):
            if fault.start >= before.at:
                # Measured only if another node could observe the lease without interruption.
                if self._taken_over_by(fault.start) <= history.downtime.deadline(fault.start, TAKEOVER_SECONDS):
                    self.result.recovery["node"].append(history.downtime.available_seconds(fault.start, after.at))
                break

    def _check_effects(self) -> None:
        """Check the statements of each effect about itself."""
        triggers = {
            label: sum(operation.name == "trigger" and operation.is_unknown for operation in entity.operations)
            for label, entity in self.history.entities.items()
        }
        unknown_instants: dict[str, set[int]] = defaultdict(set)
        for effect in self.history.effects:
            entity = self.history.entities.get(effect.label)
            due = self.history.true_due_at(effect.due_us)
            early_by = effect.due_us / 1e6 - self.history.clock_ahead(due) - effect.wall / 1e9
            if early_by > CLOCK_RESOLUTION_SECONDS:
                self._add_violation("early", effect.label, effect.at, f"by {early_by:.4f} s")
            if not effect.signed:
                self._add_violation("signature", effect.label, effect.at)
            if entity is None or effect.nonce != entity.value["nonce"] or effect.tenant != entity.tenant:
                self._add_violation("cross-tenant", effect.label, effect.at, f"at {effect.tenant}")
            if effect.occurrence not in self.expected:
                unknown_instants[effect.label].add(effect.due_us)
                manual = effect.kind == "manual" and len(unknown_instants[effect.label]) <= triggers.get(
                    effect.label, 0
                )
                if not manual:
                    self._add_violation(
                        "phantom", effect.label, effect.at, f"due {self.history.due_at(effect.due_us):.3f}"
                    )

    def _check_keys(self) -> None:
        owners: dict[str, Occurrence] = {}
        for occurrence, effects in self.history.by_occurrence.items():
            # A creation of unknown outcome that was lost, and is repeated, has another id.
            keys = {effect.key for effect in effects if effect.kind == "planned" or not self._may_be_lost(effect)}
            if len(keys) > 1:
                self._add_violation("key-unstable", occurrence[0], effects[0].at)
            for effect in effects:
                if owners.setdefault(effect.key, occurrence) != occurrence:
                    self._add_violation("key-reused", effect.label, effect.at, effect.key)

    def _may_be_lost(self, effect: Effect) -> bool:
        """Return whether a failover may have lost the object of an effect that had arrived before."""
        entity = self.history.entities.get(effect.label)
        return (
            entity is not None
            and self.history.may_be_rewound(effect.at)
            and entity.touched_by_rewind(self.history) <= effect.at
        )

    def _check_serial_order(self) -> None:
        """Check that runs of serial schedules do not overlap, and keep their order."""
        for label, effects in self.history.by_entity.items():
            entity = self.history.entities.get(label)
            if entity is None or entity.value.get("overlap", "allow") == "allow":
                continue
            for before, after in _overlapping_pairs(effects):
                since, until = before.at - TAKEOVER_SECONDS, after.at + COMPLETION_WRITE_SECONDS
                if not any(
                    self.history.faults_between(since, until, *OUTAGE_FAULTS, node=effect.node)
                    for effect in (before, after)
                ):
                    self._add_violation("overlap", label, after.at, f"{before.ended} is after {after.at:.3f}")
            firsts: dict[Occurrence, Effect] = {}
            for effect in effects:
                if effect.kind == "planned":
                    firsts.setdefault(effect.occurrence, effect)
            if entity.value["overlap"] == "queue":
                for before, after in pairwise(firsts.values()):
                    if after.due_us < before.due_us and not self._may_have_lost_first_attempt(before, after):
                        self._add_violation(
                            "out-of-order", label, after.at, f"due {self.history.due_at(after.due_us):.3f}"
                        )

    def _may_have_lost_first_attempt(self, before: Effect, after: Effect) -> bool:
        """Return whether the first attempt of the earlier occurrence may have been lost before it arrived."""
        due = self.history.due_at(after.due_us)
        return after.attempt > 1 and bool(
            self.history.faults_between(
                due - COMPLETION_WRITE_SECONDS, before.at + COMPLETION_WRITE_SECONDS, *OUTAGE_FAULTS
            )
        )

    def _check_arrivals_without_keys(self) -> None:
        """Check without the due instants that effects claim: did enough effects arrive in time for all occurrences?"""
        required: dict[str, list[Expectation]] = defaultdict(list)
        for expectation in self.expected.values():
            if (
                expectation.requirement == "must"
                and not expectation.entity.serial
                and not self._is_excused(expectation)
            ):
                required[expectation.entity.label].append(expectation)
        for label, expectations_of_label in required.items():
            effects = self.history.by_entity[label]
            retry_slack = 10.0 if any(effect.refused for effect in effects) else 0.0
            uncertainties = [self.history.clock_uncertainty(expectation.due) for expectation in expectations_of_label]
            true_dues = [self.history.true_due_at(expectation.due_us) for expectation in expectations_of_label]
            windows = [
                (
                    due - self.history.clock_ahead(due) - CLOCK_RESOLUTION_SECONDS,
                    self._window_end(expectation) + retry_slack + uncertainty,
                )
                for expectation, due, uncertainty in zip(expectations_of_label, true_dues, uncertainties, strict=True)
            ]
            arrivals = [effect.at for effect in effects if effect.ok or self._was_interrupted(effect)]
            missing = len(windows) - match_points(windows, arrivals)
            if missing:
                self._add_violation("lost-unkeyed", label, expectations_of_label[0].due, f"{missing} of {len(windows)}")

    def _was_interrupted(self, effect: Effect) -> bool:
        """Return whether a fault prevented the end of an attempt, or its retry, which then may be after the window."""
        return (effect.ended is None or effect.refused) and bool(
            self.history.faults_between(
                effect.at, effect.at + MAX_HANDLER_SECONDS + COMPLETION_WRITE_SECONDS, *OUTAGE_FAULTS, node=effect.node
            )
        )

    def _window_end(self, expectation: Expectation) -> float:
        history, since = self.history, expectation.startable_at
        if not history.faults_between(since - TAKEOVER_SECONDS, since + MAX_LATENESS_SECONDS, *OUTAGE_FAULTS):
            return history.downtime.deadline(
                since,
                MAX_LATENESS_SECONDS
                + history.notification_delay
                + history.cpu_starvation(since, since + TAKEOVER_SECONDS),
            )
        fault_count = len(
            history.faults_between(since - TAKEOVER_SECONDS, since + 3 * TAKEOVER_SECONDS, *OUTAGE_FAULTS)
        )
        seconds = TAKEOVER_SECONDS * (1 + fault_count) + history.cpu_starvation(
            since, since + TAKEOVER_SECONDS * (1 + fault_count)
        )
        return history.downtime.deadline(since, seconds)

    def _check_accounting(self) -> None:
        """Check that every instant has exactly one record, consistent with the effects."""
        for occurrence, expectation in self.expected.items():
            count = len(self.records.get(occurrence, []))
            if not count and expectation.kind == "planned":
                count = sum(a <= expectation.due_us <= b for a, b, _ in self.ranges[expectation.entity.label])
            if count > 1 or (
                count == 0
                and (
                    expectation.requirement == "must"
                    or any(not self._may_be_lost(effect) for effect in self.history.by_occurrence.get(occurrence, []))
                )
            ):
                self._add_violation("accounting", occurrence[0], expectation.due, f"{count} records")
        for occurrence, records in self.records.items():
            effects = self.history.by_occurrence.get(occurrence, [])
            due = self.history.due_at(occurrence[2])
            if occurrence not in self.expected and occurrence[1] != "manual":
                self._add_violation(
                    "accounting", occurrence[0], due, "a record of an instant that the oracle does not contain"
                )
            states = {record["state"] for record in records}
            if "completed" in states and not any(
                effect.plan == "ok" and effect.ended is not None for effect in effects
            ):
                self._add_violation("phantom-success", occurrence[0], due)
            if "skipped" in states and any(
                effect.ok and not self.history.may_be_rewound(effect.at) for effect in effects
            ):
                self._add_violation("accounting", occurrence[0], due, "skipped, but it was delivered")

    def _check_objects(self) -> None:
        """Check that each acknowledged object exists once."""
        recorded_labels = {record["label"] for record in self.history.records}
        for entity in self.history.entities.values():
            created = any(
                operation.name == "create"
                and operation.type == "ok"
                and operation.completed_at < entity.touched_by_rewind(self.history)
                for operation in entity.operations
            )
            deleted = any(operation.name == "delete" and operation.type != "fail" for operation in entity.operations)
            due_after_end = entity.once and self.history.due_at(entity.value["due_us"]) > self.history.end
            if created and not deleted and not due_after_end and entity.label not in recorded_labels:
                self._add_violation(
                    "lost-write", entity.label, entity.operations[0].completed_at, "acknowledged, but missing"
                )
        reschedules = {
            entity.label: sum(
                operation.name == "update" and operation.type != "fail" for operation in entity.operations
            )
            for entity in self.history.entities.values()
            if entity.once
        }
        ids: dict[str, set[object]] = defaultdict(set)
        for record in self.history.records:
            if record["what"] == "schedule" or (record["what"] == "job" and record["kind"] == "once"):
                ids[record["label"]].add(record["id"])
        for label, object_ids in ids.items():
            if len(object_ids) > 1 + min(1, reschedules.get(label, 0)):  # a rescheduled job is two jobs
                self._add_violation("dup-object", label, 0.0, f"{len(object_ids)} objects of one request")

    def _check_transactions(self) -> None:
        """Check that each completed job, and no other, has one row from its handler's transaction."""
        row_records = [record for record in self.history.records if record["what"] == "row"]
        written = Counter(record["key"] for record in row_records)
        # Rows that were not there before the jobs were read.
        late = {record["key"] for record in row_records if record.get("is_late")}
        for record in self.history.records:
            if record["what"] != "job" or not record["exact"]:
                continue
            rows = written.pop(record["key"], 0)
            if record["key"] in late and record["state"] != "completed":
                continue  # it has completed meanwhile
            if rows != (record["state"] == "completed"):
                self._add_violation(
                    "transaction", record["label"], self.history.due_at(record["due_us"]), f"{rows} rows"
                )
        for key in written.keys() - late:
            self._add_violation("transaction", key, 0.0, "a row of a job that does not exist")

    def _check_recovery(self) -> None:
        """Check that after all faults runs are on time and nothing is left over."""
        for violation in list(self.result.violations):
            entity = self.history.entities.get(violation.label)
            if violation.name in ("lost", "late") and entity is not None and entity.value.get("canary"):
                self._add_violation("not-healed", violation.label, violation.at, violation.name)
        for record in self.history.records:
            if record["what"] == "job" and record["state"] in ("pending", "running"):
                due = self.history.due_at(record["due_us"])
                if due < self.history.end - MAX_LATENESS_SECONDS and self.is_settled(record["label"]):
                    self._add_violation("not-healed", record["label"], due, f"still {record['state']}")
        self._measure_store_recovery()

    def _check_audit(self) -> None:
        """Check that Timebell's own audit finds no difference, and counts at least as many starts as arrived."""
        for audit in self.history.audits:
            for difference in audit["differences"]:
                if difference["finding"] == "early" and self.history.clock_uncertainty(
                    self.history.true_due_at(to_microseconds(difference["at"]))
                ):
                    continue  # it started while the database's clock was shifted
                self._add_violation(
                    "audit",
                    difference["schedule"],
                    0.0,
                    f"{difference['finding']} at {difference['at']}: {difference['detail']}",
                )
            arrived = self.count_arrived(audit["from_us"], audit["to_us"])
            self.result.audit_counts = {
                "fired": audit["fired"],
                "seen": arrived,
                "differences": len(audit["differences"]),
            }
            if audit["fired"] < arrived:
                detail = f"{audit['fired']} started according to the audit, {arrived} arrived"
                self._add_violation("audit", "all", 0.0, detail)

    def count_arrived(self, from_us: int, to_us: int) -> int:
        """Return the number of planned occurrences in a range that arrived.

        Not counted are those whose attempts a failover forgot, because it may have skipped them as missed afterwards.
        """
        return sum(
            kind == "planned"
            and from_us <= due_us < to_us
            and not all(self.history.may_be_rewound(effect.at) for effect in effects)
            for (_, kind, due_us), effects in self.history.by_occurrence.items()
        )

    def _check_loss_reports(self) -> None:
        """Check that each failover that lost acknowledged writes was reported, with at least the numbers seen here."""
        history = self.history
        reports = [
            (history.true_due_at(line["from_us"]), history.true_due_at(line["until_us"]), line["counts"])
            for line in history.reported_rewinds
        ]
        recorded_labels = {record["label"] for record in history.records}
        margin = LOSS_REPORT_MARGIN_SECONDS
        for start, killed_at, _ in history.rewinds:
            lost = Counter(
                "jobs" if entity.once else "schedules"
                for entity in history.entities.values()
                if entity.label not in recorded_labels
                for operation in entity.operations
                if operation.name == "create" and operation.type == "ok"
                if start <= operation.invoked_at and operation.completed_at <= killed_at
            )
            for kind, count in lost.items():
                reported = sum(
                    counts[kind] for a, b, counts in reports if a <= killed_at + margin and b >= start - margin
                )
                if reported < count:
                    self._add_violation("loss-report", "all", start, f"lost {count} {kind}, reported {reported}")
        for a, b, _ in reports:
            if not any(a <= killed_at + margin and b >= start - margin for start, killed_at, _ in history.rewinds):
                self._add_violation("loss-report", "all", a, "a loss was reported, but nothing was lost")

    def _check_errors(self) -> None:
        """Check that no operation was answered with status 500: a node knows every error of a database."""
        for entity in self.history.entities.values():
            for operation in entity.operations:
                if operation.type == "error":
                    self._add_violation("server-error", entity.label, operation.invoked_at, str(operation.body))

    def _measure_store_recovery(self) -> None:
        """Measure the time from each return of the database until all occurrences due meanwhile had started.

        Only available time counts, because the next fault may follow immediately. For objects that a client could
        create only later, the time counts from then. Occurrences whose node had a fault meanwhile are excluded.
        """
        history = self.history
        for fault in history.faults_between(0, history.end, *STORE_FAULTS):
            delays = []
            for expectation in self.expected.values():
                if (
                    expectation.requirement == "must"
                    and fault.start < expectation.due < fault.end
                    and not expectation.entity.serial
                ):
                    first = next(iter(history.by_occurrence.get(expectation.occurrence, [])), None)
                    if first is None or first.attempt > 1 or first.at < fault.end:
                        continue
                    if not history.faults_between(fault.end, first.at, *NODE_FAULTS, node=first.node):
                        delays.append(
                            history.downtime.available_seconds(
                                max(fault.end, min(expectation.startable_at, first.at)), first.at
                            )
                        )
            if delays:
                self.result.recovery["store"].append(max(delays))

    def is_settled(self, label: str) -> bool:
        """Return whether no attempt of it failed at the very end of the run."""
        return not any(
            effect.at > self.history.end - TAKEOVER_SECONDS and effect.refused
            for effect in self.history.by_entity[label]
        )


def _overlapping_pairs(effects: list[Effect]) -> Iterator[tuple[Effect, Effect]]:
    """Yield pairs of different occurrences that ran concurrently; an effect without an end has no duration."""
    longest: Effect | None = None
    for effect in effects:
        running = longest is not None and longest.ended is not None and effect.at < longest.ended
        if longest is not None and running and longest.occurrence != effect.occurrence:
            yield longest, effect
        if longest is None or (effect.ended or effect.at) > (longest.ended or longest.at):
            longest = effect


def check_history(history: History) -> Verdict:
    """Return the violations of a history."""
    return HistoryChecker(history).verdict()
