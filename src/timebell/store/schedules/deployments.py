"""Deployments: which release of a program defines the schedules in code.

A deployment is one release of one program. The newest deployment of a program (the one that was first seen last) with
a live node defines the program's schedules: it writes its definitions, and retires the schedules that it no longer
defines. When it has no live node, the newest remaining deployment applies its definitions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache

from sqlalchemy import Select, and_, bindparam, or_, select, update

from timebell.model.schedule import Schedule
from timebell.store.schedules.actions import delete_schedule, pause_schedule, resume_schedule
from timebell.store.schedules.calendars import upsert_schedule_on_calendar
from timebell.store.schedules.schedules import JobBuilder
from timebell.store.schema import deployments, nodes, schedules
from timebell.store.transaction import Transaction

REMOVED_FROM_CODE = "removed from code"
"""Reason of the pause of a schedule that the newest deployment no longer defines."""


MAX_LISTED_DEFINITIONS = 500


@dataclass(frozen=True, slots=True)
class Deployment:
    """A release of a program: its id, the name of the program, and the number of schedules that it defines."""

    id: str
    program: str
    definitions: int


@dataclass(frozen=True, slots=True)
class AppliedDefinitions:
    """The names of the schedules that changed when a deployment applied its definitions."""

    retired: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()


def register_deployment(tx: Transaction, deployment: Deployment, now: datetime) -> None:
    """Record when a deployment was first seen; later calls change nothing."""
    if tx.execute(select(deployments.c.id).where(deployments.c.id == deployment.id)).first() is None:
        values = {"id": deployment.id, "program": deployment.program, "definitions": deployment.definitions}
        tx.execute(tx.dialect.insert_ignoring_duplicates(deployments), [{**values, "first_seen_at": now}])


def find_newest_deployment(tx: Transaction, program: str, node_id: str | None = None) -> str | None:
    """Return the newest deployment of a program with a live node, or None.

    One that defines schedules comes before those that define none: a process that only handles jobs must not retire the
    schedules of another process of its program. With `node_id`, only that node counts: on SQLite, all others are the
    remains of crashed engines.
    """
    query = _select_newest(of_all_nodes=node_id is None)
    return tx.execute(query, {"program": program, "node_id": node_id}).scalar()


@cache  # each heartbeat executes it, and building the statement takes longer than that
def _select_newest(*, of_all_nodes: bool) -> Select[str]:
    is_live = select(nodes.c.deployment)
    if not of_all_nodes:
        is_live = is_live.where(nodes.c.id == bindparam("node_id"))
    return (
        select(deployments.c.id)
        .where(deployments.c.program == bindparam("program"), deployments.c.id.in_(is_live))
        .order_by((deployments.c.definitions > 0).desc(), deployments.c.first_seen_at.desc(), deployments.c.id.desc())
        .limit(1)
    )


def apply_definitions(
    tx: Transaction,
    deployment: Deployment,
    defined: Sequence[Schedule],
    build: JobBuilder,
    now: datetime,
    *,
    prune: bool,
    node_id: str | None = None,
) -> AppliedDefinitions | None:
    """Write the schedules that a deployment defines, and pause (or delete, with `prune`) those that it removed.

    Returns None without a change if the deployment is not the newest one with a live node. Holds locks on the
    program's deployments, so that two deployments cannot apply at the same time. Schedules of another process of the
    same deployment are left alone. A schedule that this deployment defined before it was retired catches up, as after
    an outage of the program.
    """
    of_program = deployments.c.program == deployment.program
    own_ids = tx.execute(select(deployments.c.id).where(of_program).order_by(deployments.c.id).with_for_update())
    earlier_ids = [row.id for row in own_ids if row.id != deployment.id]
    if find_newest_deployment(tx, deployment.program, node_id) != deployment.id:
        return None
    written = {upsert_schedule_on_calendar(tx, draft, build, now, replace=True).id for draft in defined}
    rows = tx.execute(select(schedules.c.id, schedules.c.tenant_id, schedules.c.name, schedules.c.enabled,
                             schedules.c.pause_reason, schedules.c.deployment)
                      .where(schedules.c.code_hash.is_not(None),
                             schedules.c.deployment.in_(earlier_ids) | schedules.c.id.in_(written))).all()  # fmt: skip
    retired, resumed = [], []
    for row in rows:
        if row.id in written:
            if not row.enabled and row.pause_reason == REMOVED_FROM_CODE:
                resume_schedule(tx, row.tenant_id, row.id, row.deployment == deployment.id, build, now)
                resumed.append(row.name)
            if row.deployment != deployment.id:
                tx.execute(update(schedules).where(schedules.c.id == row.id).values(deployment=deployment.id))
        elif row.deployment in earlier_ids and prune:
            delete_schedule(tx, row.tenant_id, row.id, build, now)
            retired.append(row.name)
        elif row.deployment in earlier_ids and row.enabled:
            pause_schedule(tx, row.tenant_id, row.id, REMOVED_FROM_CODE, build, now)
            retired.append(row.name)
    return AppliedDefinitions(tuple(retired), tuple(resumed))


def are_definitions_applied(tx: Transaction, deployment: Deployment) -> bool:
    """Return whether no other deployment has written over the definitions since this one applied them.

    A newer deployment may have started and stopped between two heartbeats of this node.
    """
    own = {"program": deployment.program, "deployment": deployment.id}
    return tx.execute(_select_overwritten(), own).scalar() is None


@cache
def _select_overwritten() -> Select[str]:
    """Select a definition that another deployment has written over.

    The condition on the program comes first, outside the OR, so that the index on `deployment` is used.
    """
    ids = select(deployments.c.id).where(deployments.c.program == bindparam("program"))
    of_program = schedules.c.deployment.in_(ids)
    is_own = schedules.c.deployment == bindparam("deployment")
    is_retired = schedules.c.pause_reason == REMOVED_FROM_CODE
    overwritten = and_(of_program, or_(and_(~is_own, schedules.c.enabled), and_(is_own, is_retired)))
    return select(schedules.c.id).where(overwritten).limit(1)


def list_definitions(tx: Transaction) -> dict[str, list[str]]:
    """Return the names of the schedules that the code of each live deployment defines, by the deployment's id.

    Of all deployments together at most MAX_LISTED_DEFINITIONS.
    """
    rows = tx.execute(
        select(schedules.c.deployment, schedules.c.name)
        .where(
            schedules.c.deployment.in_(select(nodes.c.deployment)),
            schedules.c.pause_reason.is_distinct_from(REMOVED_FROM_CODE),
        )
        .order_by(schedules.c.deployment, schedules.c.name)
        .limit(MAX_LISTED_DEFINITIONS)
    )
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.deployment, []).append(row.name)
    return names
