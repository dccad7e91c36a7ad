"""Seeded bugs: each changes the source text of one guard in the real code, and the tests must detect it."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from timebell.store.sql import SQL


@dataclass(frozen=True)
class Mutant:
    """A bug: in each place (`module:name`, without `timebell.`) the first text is replaced by the second."""

    name: str
    edits: tuple[tuple[str, str, str], ...]

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Run the block with this bug. A missing text is an error: the code has changed, and the edit must follow."""
        with pytest.MonkeyPatch.context() as patch:
            for where in dict.fromkeys(where for where, _, _ in self.edits):
                _seed(patch, where, [(old, new) for there, old, new in self.edits if there == where])
            yield


def _seed(patch: pytest.MonkeyPatch, where: str, changes: list[tuple[str, str]]) -> None:
    module_name, _, path = where.partition(":")
    module = importlib.import_module(f"timebell.{module_name}")
    holder, _, name = path.rpartition(".")
    owner = getattr(module, holder) if holder else module
    there: Any = vars(owner)[name]
    if isinstance(there, SQL):
        made: Any = SQL(_changed(there.text, changes))
    else:
        source = _changed(textwrap.dedent(inspect.getsource(there)), changes)
        flags = annotations.compiler_flag
        found: dict[str, Any] = {}
        exec(compile(source, f"<{where}>", "exec", flags=flags), vars(module), found)
        made = found[name]
    patch.setattr(owner, name, made)
    for other in [one for key, one in sys.modules.items() if key.startswith("timebell.")]:
        for alias, value in list(vars(other).items()):
            if value is there:
                patch.setattr(other, alias, made)


def _changed(text: str, changes: list[tuple[str, str]]) -> str:
    for old, new in changes:
        assert old in text, f"{old!r} is not in the code:\n{text}"
        text = text.replace(old, new)
    return text


FENCE = " AND j.attempt = d.attempt"
RETRY = "store.dialects.sqlite.complete:RETRY"
MUTANTS = [
    Mutant(
        "a claim takes what is not due",
        (
            ("store.dialects.sqlite.claim:CLAIM", " AND run_at <= :now", ""),
            ("store.dialects.sqlite.claim:READ_CLAIMABLE", " AND run_at <= :now", ""),
        ),
    ),
    Mutant(
        "the cursor moves in a transaction before the jobs",
        ((
            "store.schedules.schedules:_fire_locked", "    if new:\n",
            "    tx.dialect.advance_cursors(tx, advances)\n    tx.driver.execute('COMMIT')\n"
            "    tx.driver.execute('BEGIN IMMEDIATE')\n    if new:\n",
        ),),
    ),
    Mutant(
        "the next instant is computed from now",
        ((
            "model.decide:plan", "    recent, following, error = _due_instants(recurrence, recent_from, until)\n",
            "    recent, _, error = _due_instants(recurrence, recent_from, until)\n"
            "    following = next_cursor(recurrence, now + timedelta(seconds=3))[0]\n",
        ),),
    ),
    Mutant(
        "due jobs are searched in a window",
        ((
            "store.dialects.sqlite.fire:READ_DUE_SCHEDULES",
            "next_fire_at <= :now", "next_fire_at BETWEEN :now - 60000000 AND :now",
        ),),
    ),
    Mutant(
        "a completion has no fence",
        (
            ("store.dialects.sqlite.complete:READ_COMPLETED", FENCE, ""),
            ("store.dialects.sqlite.complete:COPY_COMPLETED", FENCE, ""),
            ("store.dialects.sqlite.complete:DELETE_COMPLETED_RETURNING", " AND d.attempt = j.attempt", ""),
        ),
    ),
    Mutant("a retry has no fence", ((RETRY, FENCE, ""),)),
    Mutant(
        "attempts have no numbers",
        (
            ("store.dialects.sqlite.claim:CLAIM", "attempt = attempt + 1", "attempt = 1"),
            ("store.dialects.sqlite.claim:READ_CLAIMABLE", "'attempt', attempt + 1", "'attempt', 1"),
            ("store.dialects.sqlite.claim:START_READ", "attempt = attempt + 1", "attempt = 1"),
        ),
    ),
    Mutant(
        "a cancel does not check whether the job runs",
        (
            ("store.jobs.repository:cancel", "row is not None and row.state == JobState.PENDING", "row is not None"),
        ),
    ),
    Mutant(
        "a cancel ends a running job and returns prevented",
        (
            ("store.jobs.repository:cancel", "row is not None and row.state == JobState.PENDING", "row is not None"),
            ("store.jobs.repository:cancel", "expected_state=JobState.PENDING", "expected_state=JobState(row.state)"),
        ),
    ),
    Mutant("a cancelled job is retried", ((RETRY, " AND NOT j.cancel_requested", ""),)),
    Mutant("a rescheduled job stays", ((
        "store.jobs.repository:reschedule", "or not complete_jobs(tx, [completion])", "",
    ),)),
    Mutant("a repeated request creates two jobs", ((
        "store.jobs.repository:_existing_by_request", "return existing", "return {}",
    ),)),
    Mutant("leases are judged by the wall clock", (
        ("engine.heartbeat:Heartbeat._watch_leases", "now = node.clock.monotonic()", "import time; now = time.time()"),
        ("engine.heartbeat:Heartbeat._watch_leases", "read_at = node.clock.monotonic()", "read_at = time.time()"),
    )),
    Mutant("leases are judged by the database's clock", (
        (
            "engine.heartbeat:Heartbeat._watch_leases",
            "now = node.clock.monotonic()", "now = node.clock.now().timestamp()",
        ),
        (
            "engine.heartbeat:Heartbeat._watch_leases",
            "read_at = node.clock.monotonic()", "read_at = node.clock.now().timestamp()",
        ),
    )),
    Mutant("a node judges its own lease by the wall clock", ((
        "engine.heartbeat:Heartbeat._stop_expired", "now = self.node.clock.monotonic()",
        "import time; now = time.time() - self.__dict__.setdefault('_wall', time.time() - self.node.clock.monotonic())",
    ),)),
    Mutant("lost attempts are not recovered", ((
        "engine.heartbeat:Heartbeat._recover_abandoned", "if not keys:", "if True:",
    ),)),
    Mutant(
        "the lease is not checked before the delivery",
        ((
            "engine.runner:Runner.check",
            "if self.node.clock.monotonic() >= running.lease_until:", "if False:",
        ),),
    ),
    Mutant(
        "an attempt continues without its lease",
        (("engine.heartbeat:Heartbeat._stop_expired", "if running.lease_until <= now:", "if False:"),),
    ),
    Mutant(
        "completed before it is delivered",
        ((
            "engine.worker:Worker._run_group", "            unfinished = self.fast_path.run",
            "            from timebell.store.jobs import serial\n"
            "            for one in [one.attempt for one in group]:\n"
            "                completion = self.runner.completions.success(one, one.number)\n"
            "                await self.node.store.run(serial.complete_one, completion)\n"
            "            unfinished = self.fast_path.run",
        ),),
    ),
    Mutant("keys are random", (("ids:occurrence_key", "{instant}Z", "{os.urandom(4).hex()}Z"),)),
    Mutant(
        "a retry moves the nominal instant",
        ((RETRY, "run_at = d.run_at,", "run_at = d.run_at, scheduled_at = d.run_at,"),),
    ),
    Mutant(
        "a retry does not wait",
        (("model.decide:complete_after_failure", "run_at=at + timedelta(seconds=pause)", "run_at=at"),),
    ),
    Mutant(
        "two simultaneous manual runs are one occurrence",
        (("store.schedules.actions:_has_manual_occurrence", "return True", "return False"),),
    ),
    Mutant("a pause leaves no rows", ((
        "store.schedules.schedules:skip_paused_occurrences", "if planned.skips:", "if False:",
    ),)),
    Mutant("a resume fires paused occurrences", ((
        "store.schedules.actions:resume_schedule", "if not catch_up:", "if False:",
    ),)),
    Mutant(
        "an edit loses due occurrences",
        ((
            "store.schedules.schedules:edit", "decide_due_occurrences(tx, old, build, now)", "pass",
        ),),
    ),
    Mutant(
        "a deleted schedule's jobs run",
        ((
            "store.schedules.actions:delete_schedule",
            'repository.cancel_matching(\n            tx, {"schedule_id": id_}, now, after, 1000,'
            " reason=SCHEDULE_DELETED_REASON\n        )",
            "(repository.BulkCancelResult(0, 0), None)",
        ),),
    ),
    Mutant(
        "a backfill repeats completed occurrences",
        (("store.schedules.actions:backfill_schedule", "[at for at in instants if at not in done]", "instants"),),
    ),
    Mutant("overlap sees no live job", ((
        "store.schedules.schedules:count_live_jobs", "if ids else []", "if False else []",
    ),)),
    Mutant(
        "the next serial job is not released",
        (("store.jobs.serial:release_next", "if schedules else 0", "if False else 0"),),
    ),
    Mutant("catch-up `skip` leaves no rows", (
        (
            "model.decide:_catch_up",
            "return [], list(_make_skips(recurrence, cursor, end, Reason.MISSED))", "return [], []",
        ),
    )),
    Mutant(
        "catch-up ignores its window",
        (("model.decide:_catch_up", "min(max(cursor, now - schedule.catch_up_span), end)", "cursor"),),
    ),
    Mutant("catch-up ignores its limit", (("model.decide:_catch_up", "policies.catch_up_limit", "10**6"),)),
    Mutant("a retry does not count", ((RETRY, "j.attempts_used + d.counts", "j.attempts_used"),)),
    Mutant(
        "overlap ignores waiting retries",
        (
            (
                "store.dialects.sqlite.fire:COUNT_LIVE_JOBS", "WHERE j.hold",
                "WHERE (j.state = 'running' OR j.attempt = 0) AND j.hold",
            ),
        ),
    ),
    Mutant(
        "a concurrent job does not release the next serial job",
        (("store.dialects.sqlite.insert:MARK_SERIAL", "NOT j.serial", "false AND NOT j.serial"),),
    ),
    Mutant("a queue lets one too many run", (
        ("store.jobs.queue_limits:claim_limited", 'queue["concurrency"] - tx', 'queue["concurrency"] + 1 - tx'),
    )),
    Mutant("a rate is ignored", (
        (
            "store.jobs.queue_limits:claim_limited",
            "limit = min(limit, available_starts(starts, rate, per, now_micros))", "pass",
        ),
    )),
    Mutant("expired jobs use up the rate", (
        (
            "store.jobs.queue_limits:claim_limited",
            "sum(attempt.expires_at is None or attempt.expires_at > now for",
            "sum(1 for",
        ),
    )),
    Mutant("a group has no limit", (
        ("store.jobs.queue_limits:claim_limited", 'queue["concurrency_per_group"] is None', "True"),
    )),
    Mutant("a completion does not release the next job of its group", ((
        "store.jobs.groups:release_next", "while counts:", "while False:",
    ),)),
    Mutant("a paused queue continues", (
        ("store.jobs.claim:scan_lanes", ' or row["paused"]', ""),
        ("store.jobs.queue_limits:claim_limited", 'if queue["paused"]:', "if False:"),
    )),
    Mutant("a node without notifications does not poll", (
        ("engine.heartbeat:Heartbeat.step", "node.wakeups.worker.wake()", "pass"),
        ("engine.heartbeat:Heartbeat.step", "node.wakeups.planner.wake()", "pass"),
    )),
    Mutant(
        "a moved occurrence also fires at its original time", (("model.decide:plan", "if overridden:", "if False:"),)
    ),
    Mutant("a range counts too few", (("model.decide:_make_skips", "recurrence.count(start, end)", "len(instants)"),)),
    Mutant(
        "repair runs only at the start",
        (("engine.leader.repair:Repair.step", "monotonic - self._last_run_at < REPAIR_INTERVAL_SECONDS", "True"),),
    ),
]  # fmt: skip
