"""Bugs, each planted into one guard of the real code by a change of its text: to see that somebody notices."""

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

from timebell.store.statement import Statement


@dataclass(frozen=True)
class Mutant:
    """A bug: in each place (`module:name`, without `timebell.`) the first text is replaced by the second."""

    name: str
    edits: tuple[tuple[str, str, str], ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The product with this bug. A text that is not there is an error: the code has changed, and so must this."""
        with pytest.MonkeyPatch.context() as patch:
            for where in dict.fromkeys(where for where, _, _ in self.edits):
                _plant(patch, where, [(old, new) for there, old, new in self.edits if there == where])
            yield


def _plant(patch: pytest.MonkeyPatch, where: str, changes: list[tuple[str, str]]) -> None:
    module_name, _, path = where.partition(":")
    module = importlib.import_module(f"timebell.{module_name}")
    holder, _, name = path.rpartition(".")
    owner = getattr(module, holder) if holder else module
    there: Any = vars(owner)[name]
    if isinstance(there, Statement):
        text = there.template.template
        made: Any = Statement(_changed(text, changes), **there.columns)
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
        assert old in text, f"{old!r} is not in the code any more:\n{text}"
        text = text.replace(old, new)
    return text


FENCE = " AND j.attempt = d.attempt"
MUTANTS = [
    Mutant(
        "a claim takes what is not due",
        (("store.jobs.claim:CLAIM", "$due", "true"), ("store.jobs.claim:CLAIM_UNCHANGED", "$due", "true")),
    ),
    Mutant(
        "the cursor moves in a transaction before the jobs",
        ((
            "store.schedules.schedules:_fire", "    if new:\n",
            "    tx.fetch(ADVANCE, advances)\n    tx.driver.execute('COMMIT')\n"
            "    tx.driver.execute('BEGIN IMMEDIATE')\n    if new:\n",
        ),),
    ),
    Mutant(
        "the next instant is computed from now",
        ((
            "model.decide:plan", "    recent, following, fault = _due(recurrence, recent_from, until)\n",
            "    recent, _, fault = _due(recurrence, recent_from, until)\n"
            "    following = next_of(recurrence, now + timedelta(seconds=3))[0]\n",
        ),),
    ),
    Mutant(
        "due is what lies in a window",
        (("store.schedules.schedules:DUE", "$due_schedule", "next_fire_at BETWEEN :now - 60000000 AND :now"),),
    ),
    Mutant(
        "an ending has no fence",
        (("store.jobs.complete:COPY_ENDED", FENCE, ""), ("store.jobs.complete:END", FENCE, "")),
    ),
    Mutant("a retry has no fence", (("store.jobs.complete:RETRY", FENCE, ""),)),
    Mutant(
        "a handler's transaction has no fence",
        (("engine.transactional_completion:Within._completing", "if ending.id not in ended[-1][1].ids:", "if False:"),),
    ),
    Mutant(
        "attempts have no numbers",
        (
            ("store.jobs.claim:CLAIM", "attempt = attempt + 1", "attempt = 1"),
            ("store.jobs.claim:CLAIM_UNCHANGED", "attempt = attempt + 1", "attempt = 1"),
        ),
    ),
    Mutant(
        "a cancel does not look whether it runs",
        (
            ("store.jobs.repository:cancel", "row is not None and row.state == JobState.PENDING", "row is not None"),
        ),
    ),
    Mutant(
        "a cancel ends what runs, and says prevented",
        (
            ("store.jobs.repository:cancel", "row is not None and row.state == JobState.PENDING", "row is not None"),
            ("store.jobs.repository:cancel", "was=JobState.PENDING", "was=JobState(row.state)"),
        ),
    ),
    Mutant("a cancelled job is tried again", (("store.jobs.complete:RETRY", " AND NOT j.cancel_asked", ""),)),
    Mutant("a job that was moved stays", (("store.jobs.repository:reschedule", "or not end(tx, [ending])", ""),)),
    Mutant("a request twice is two jobs", (("store.jobs.repository:_requested", "return existing", "return {}"),)),
    Mutant("leases are judged by the wall clock", ((
        "engine.heartbeat:Pulse._watch", "now = node.clock.monotonic()", "import time; now = time.time()",
    ),)),
    Mutant("leases are judged by the database's clock", ((
        "engine.heartbeat:Pulse._watch", "now = node.clock.monotonic()", "now = node.clock.now().timestamp()",
    ),)),
    Mutant("a lease of one's own is judged by the wall clock", ((
        "engine.heartbeat:Pulse._drop_lapsed", "now = self.node.clock.monotonic()",
        "import time; now = time.time() - self.__dict__.setdefault('_wall', time.time() - self.node.clock.monotonic())",
    ),)),
    Mutant("lost attempts are not taken back", (("engine.heartbeat:Pulse._rescue", "if not keys:", "if True:"),)),
    Mutant(
        "no look at the lease before delivering",
        (("engine.runner:Runner._delivered", "if self.node.clock.monotonic() >= held.lease_until:", "if False:"),),
    ),
    Mutant(
        "an attempt goes on without its lease",
        (("engine.heartbeat:Pulse._drop_lapsed", "if held.lease_until <= now:", "if False:"),),
    ),
    Mutant(
        "completed before it is delivered",
        ((
            "engine.worker:Worker._attempt", "            if self.runner.at_once",
            "            from timebell.store.jobs import serial\n"
            "            for one in [one.attempt for one in waiting]:\n"
            "                await self.node.store.run(serial.complete, self.runner._completed(one, one.number))\n"
            "            if self.runner.at_once",
        ),),
    ),
    Mutant("keys are random", (("ids:occurrence_key", "{instant}Z", "{os.urandom(4).hex()}Z"),)),
    Mutant(
        "a retry moves the nominal instant",
        (("store.jobs.complete:RETRY", "run_at = d.run_at,", "run_at = d.run_at, scheduled_at = d.run_at,"),),
    ),
    Mutant(
        "a retry does not wait",
        (("model.decide:after_failure", "run_at=at + timedelta(seconds=pause)", "run_at=at"),),
    ),
    Mutant(
        "two runs asked for at once are one occurrence",
        (("store.schedules.actions:_made_by_hand", "return True", "return False"),),
    ),
    Mutant("a pause leaves no rows", (("store.schedules.schedules:pass_over", "if planned.skips:", "if False:"),)),
    Mutant("a resume fires what was paused", (("store.schedules.actions:resume", "if not catch_up:", "if False:"),)),
    Mutant(
        "an edit forgets what is due", (("store.schedules.schedules:edit", "settle(tx, old, build, now)", "pass"),)
    ),
    Mutant(
        "a deleted schedule's jobs run",
        ((
            "store.schedules.actions:delete",
            'repository.sweep(tx, {"schedule_id": id_}, now, after, 1000, reason=DELETED)',
            "(repository.Swept(), None)",
        ),),
    ),
    Mutant(
        "a backfill repeats what ran",
        (("store.schedules.actions:backfill", "[at for at in instants if at not in done]", "instants"),),
    ),
    Mutant("overlap sees no live job", (("store.schedules.schedules:live_of", "if ids else []", "if False else []"),)),
    Mutant("turns are not handed on", (("store.jobs.serial:let_go", "if schedules else 0", "if False else 0"),)),
    Mutant("catch-up `skip` leaves no rows", (
        ("model.decide:_catch_up", "return [], list(_skips(recurrence, cursor, end, Reason.MISSED))", "return [], []"),
    )),
    Mutant(
        "catch-up forgets its window",
        (("model.decide:_catch_up", "min(max(cursor, now - schedule.catch_up_from), end)", "cursor"),),
    ),
    Mutant("catch-up forgets its limit", (("model.decide:_catch_up", "policies.catch_up_limit", "10**6"),)),
    Mutant("a retry does not count", (("store.jobs.complete:RETRY", "j.tries + d.counts", "j.tries"),)),
    Mutant(
        "overlap ignores waiting retries",
        (
            (
                "store.schedules.schedules:LIVE", "WHERE j.hold",
                "WHERE (j.state = 'running' OR j.attempt = 0) AND j.hold",
            ),
        ),
    ),
    Mutant(
        "who was to run beside others hands no turn on",
        (("store.jobs.claim:TAKE_TURNS", "NOT j.serial", "false AND NOT j.serial"),),
    ),
    Mutant("a queue lets one too many run", (
        ("store.jobs.queue_limits:claim_limited", 'queue["concurrency"] - tx', 'queue["concurrency"] + 1 - tx'),
    )),
    Mutant("a rate is forgotten", (
        ("store.jobs.queue_limits:claim_limited", "most = min(most, allowed(starts, rate, per, at))", "pass"),
    )),
    Mutant("what has expired uses up the rate", (
        (
            "store.jobs.queue_limits:claim_limited",
            "sum(one.expires_at is None or one.expires_at > now for",
            "sum(1 for",
        ),
    )),
    Mutant("a group has no limit", (
        ("store.jobs.queue_limits:claim_limited", 'queue["concurrency_per_group"] is None', "True"),
    )),
    Mutant("who ends lets nobody of its group go", (("store.jobs.groups:let_go", "while counts:", "while False:"),)),
    Mutant("a paused queue goes on", (
        ("store.jobs.claim:seen", ' or row["paused"]', ""),
        ("store.jobs.queue_limits:claim_limited", 'if queue["paused"]:', "if False:"),
    )),
    Mutant("who hears nothing does not look", (
        ("engine.heartbeat:Pulse.step", "node.working.poke()", "pass"),
        ("engine.heartbeat:Pulse.step", "node.planning.poke()", "pass"),
    )),
    Mutant("a moved occurrence also fires where it was", (("model.decide:plan", "if overridden:", "if False:"),)),
    Mutant("a range counts too few", (("model.decide:_skips", "recurrence.count(start, end)", "len(few)"),)),
    Mutant(
        "what is lost heals at the start only",
        (("engine.leader.repair:Healing.step", "monotonic - self._looked < EVERY", "True"),),
    ),
]  # fmt: skip
