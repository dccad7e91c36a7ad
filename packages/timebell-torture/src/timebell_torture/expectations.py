"""Which occurrences must, may and must not have happened, based on the requests and their acknowledgment times."""

from __future__ import annotations

from dataclasses import dataclass

from timebell_torture.history import (
    DISARMING_VIOLATIONS,
    NODE_FAULTS,
    STORE_FAULTS,
    Entity,
    History,
    Occurrence,
    Operation,
)

MAX_LATENESS_SECONDS = 1.0  # allowed lateness without faults
TAKEOVER_SECONDS = 21.0  # until another node takes over the attempts of a dead node: lease 15 s, heartbeat 5 s, and 1 s
STORE_RECOVERY_SECONDS = 5.0  # allowed lateness after the database has returned
LOCK_RELEASE_SECONDS = 11.0  # until the database releases the locks of a frozen client
MAX_RUN_SECONDS = 4.0  # duration of the longest attempts


@dataclass(slots=True)
class Expectation:
    """One occurrence. `startable_at` is its earliest possible start: due, and certainly known to Timebell."""

    entity: Entity
    kind: str
    due_us: int
    due: float
    startable_at: float
    requirement: str = "mustnot"
    reason: str = "after-cancel"
    max_attempts: int | None = None
    """The last attempt that may have started, after a cancel while it was running."""

    @property
    def occurrence(self) -> Occurrence:
        return self.entity.label, self.kind, self.due_us


def derive_expectations(history: History) -> dict[Occurrence, Expectation]:
    """Return an expectation for every occurrence of the oracle and every acknowledged trigger."""
    expectations: dict[Occurrence, Expectation] = {}
    for entity in history.entities.values():
        touched_at = entity.touched_by_rewind(history)  # from then on its state is unknown
        for expectation in [*_planned_occurrences(history, entity), *_manual_occurrences(history, entity)]:
            if expectation.startable_at >= touched_at - MAX_LATENESS_SECONDS:
                expectation.requirement, expectation.max_attempts = "may", None
            previous = expectations.get(expectation.occurrence)
            if previous is None or _PRECEDENCE[expectation.requirement] > _PRECEDENCE[previous.requirement]:
                expectations[expectation.occurrence] = expectation
    return expectations


_PRECEDENCE = {"mustnot": 0, "may": 1, "must": 2}


def _planned_occurrences(history: History, entity: Entity) -> list[Expectation]:
    kind = "once" if entity.once else "planned"
    expectations = []
    for value, changes in entity.versions():
        for due_us in history.expected_instants(entity, value):
            due = history.due_at(due_us)
            expectation = Expectation(entity, kind, due_us, due, due)
            if entity.once:
                armed_at = (operation.completed_at for arms, operation in changes if arms)
                expectation.startable_at = min((max(due, at) for at in armed_at), default=due)
            expectation.startable_at = due if expectation.startable_at == float("inf") else expectation.startable_at
            outcomes = {
                classify(at, changes, deadline_of(history, at), history.end)
                for at in _possible_starts(history, expectation)
            }
            expectation.requirement, expectation.reason = outcomes.pop()
            if any(requirement != expectation.requirement for requirement, _ in outcomes):
                expectation.requirement = "may"
            if entity.once:
                _apply_cancels(history, expectation)
            else:
                _apply_deletes(history, expectation)
            expectations.append(expectation)
    return expectations


def _possible_starts(history: History, expectation: Expectation) -> list[float]:
    """Return the possible start times: one, or three around a shift of the database's clock."""
    uncertainty = history.clock_uncertainty(expectation.startable_at)
    at = expectation.startable_at
    return [at, at - uncertainty, at + uncertainty] if uncertainty else [at]


def deadline_of(history: History, due: float) -> float:
    """Return the time by which an occurrence must have happened, including the effects of faults."""
    affected = history.faults_between(due - TAKEOVER_SECONDS, due + MAX_LATENESS_SECONDS, *NODE_FAULTS, *STORE_FAULTS)
    seconds = TAKEOVER_SECONDS if affected else MAX_LATENESS_SECONDS + history.notification_delay
    seconds += history.clock_uncertainty(due) + history.cpu_starvation(due, due + TAKEOVER_SECONDS)
    return history.downtime.deadline(due, seconds)


def classify(due: float, changes: list[tuple[bool, Operation]], deadline: float, end: float) -> tuple[str, str]:
    """Return the requirement for an occurrence, and the violation class if it happens although it must not.

    `must`: it was certainly armed when due, and no operation up to the deadline could have disarmed it. `mustnot`: it
    was certainly disarmed, or never armed. `may`: all other cases.
    """
    certainly_armed = possibly_armed = False
    reason = "after-cancel"
    for arms, operation in changes:
        if operation.type == "fail":
            continue
        if arms and operation.completed_at <= due:
            certainly_armed = possibly_armed = True
        elif arms:
            possibly_armed = possibly_armed or operation.invoked_at <= deadline
        elif operation.completed_at < due:
            certainly_armed = possibly_armed = False
            reason = DISARMING_VIOLATIONS[operation.name]
        elif operation.invoked_at <= deadline:
            certainly_armed = False
    if deadline > end and certainly_armed:
        return "may", reason
    return ("must" if certainly_armed else "may" if possibly_armed else "mustnot"), reason


def _apply_cancels(history: History, expectation: Expectation) -> None:
    """Adjust the expectation by the outcome that each cancel reported."""
    effects = history.by_occurrence.get(expectation.occurrence, [])
    start = expectation.startable_at
    succeeded_at = next((effect.at for effect in effects if effect.ok), float("inf"))
    for operation in expectation.entity.operations:
        if operation.name != "cancel" or operation.type == "fail":
            continue
        is_certain = operation.type == "ok" and not history.may_be_lost(operation.invoked_at, operation.completed_at)
        outcome = operation.body["outcome"] if is_certain else None
        forgotten = [
            effect.attempt for effect in effects
            if effect.at <= operation.completed_at and history.may_be_rewound(effect.at)
        ]  # fmt: skip
        last_attempt = max([operation.body["attempt"], *forgotten]) if is_certain else None
        if outcome == "prevented":
            if last_attempt:  # it is not retried after the failed or forgotten attempts
                expectation.requirement, expectation.max_attempts = "may", last_attempt
            else:
                expectation.requirement, expectation.reason = "mustnot", "after-cancel"
            return
        if outcome == "in_flight":
            expectation.max_attempts = last_attempt
        if outcome == "already_done":
            creates = [create for create in expectation.entity.operations if create.name == "create"]
            expectation.requirement, _ = classify(
                start, [(True, create) for create in creates], deadline_of(history, start), history.end
            )
        elif expectation.requirement == "must" and operation.invoked_at <= max(
            succeeded_at, deadline_of(history, start)
        ):
            expectation.requirement = "may"


def _manual_occurrences(history: History, entity: Entity) -> list[Expectation]:
    """Return one expectation for each acknowledged trigger; its response contains the due instant."""
    expectations = []
    for operation in entity.operations:
        if operation.name != "trigger" or operation.type != "ok":
            continue
        due = history.due_at(operation.body["due_us"])
        due_us, startable_at = operation.body["due_us"], max(due, operation.completed_at)
        expectation = Expectation(entity, "manual", due_us, due, startable_at, "must")
        deletes = [delete for delete in entity.operations if delete.name == "delete" and delete.type != "fail"]
        deadline = deadline_of(history, expectation.startable_at)
        if deadline > history.end or any(delete.invoked_at <= deadline for delete in deletes):
            expectation.requirement = "may"
        _apply_deletes(history, expectation)
        expectations.append(expectation)
    return expectations


def _apply_deletes(history: History, expectation: Expectation) -> None:
    """Relax the expectation if its schedule was deleted: interrupted or failed attempts are then not retried."""
    effects = history.by_occurrence.get(expectation.occurrence, [])
    if expectation.requirement != "must" or any(effect.ok for effect in effects):
        return
    for operation in expectation.entity.operations:
        last = next(
            (effect for effect in reversed(effects) if effect.at <= operation.completed_at + MAX_LATENESS_SECONDS), None
        )
        if operation.name != "delete" or operation.type == "fail" or last is None:
            continue
        ended_at = last.at + MAX_RUN_SECONDS if last.ended is None else last.ended
        affected = history.faults_between(last.at, ended_at, *NODE_FAULTS, *STORE_FAULTS, node=last.node)
        retry_due = ended_at + expectation.entity.value["retry"]["delay"]
        if (affected or last.refused) and operation.invoked_at <= deadline_of(history, retry_due):
            expectation.requirement = "may"
