"""Deployments: whether the definitions of a program still apply, and which schedules each live one defines."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, update

from timebell.ids import new_id
from timebell.store.cluster import nodes
from timebell.store.schedules import deployments
from timebell.store.schedules.deployments import REMOVED_FROM_CODE, Deployment
from timebell.store.schema import schedules
from timebell.store.transaction import Transaction

from .helpers import NODE, OTHER_NODE, T0, Routes, Store, stored

OLD, NEW = Deployment("shop@1", "shop", 1), Deployment("shop@2", "shop", 1)
OTHER = Deployment("bank@1", "bank", 1)


def register(tx: Transaction) -> None:
    """Register three deployments, one of them of another program; only NEW and OTHER have nodes."""
    for deployment in (OLD, NEW, OTHER):
        deployments.register_deployment(tx, deployment, T0)
    for id_, deployment in ((NODE, NEW), (OTHER_NODE, OTHER)):
        nodes.announce(tx, nodes.Node(id_, id_, "1", "2026c", Routes(), 0, T0, T0, deployment=deployment.id))


def add(tx: Transaction, name: str, deployment: Deployment | None, **fields: Any) -> None:
    row = {"recurrence": "{}", "action": "{}", "policies": "{}", "created_at": T0, "updated_at": T0, **fields}
    defined_by = None if deployment is None else deployment.id
    tx.execute(insert(schedules).values(id=new_id(T0), tenant_id="default", name=name, deployment=defined_by, **row))


@stored
async def test_definitions_apply_until_another_deployment_changes_one(store: Store) -> None:
    await store.run(register)
    await store.run(add, "theirs", OTHER)
    await store.run(add, "by-hand", None)
    await store.run(add, "digest", NEW)
    assert await store.run(deployments.are_definitions_applied, NEW)
    await store.run(add, "retired", OLD, enabled=False, pause_reason=REMOVED_FROM_CODE)
    assert await store.run(deployments.are_definitions_applied, NEW)
    assert not await store.run(deployments.are_definitions_applied, OLD)
    await store.run(lambda tx: tx.execute(update(schedules).where(schedules.c.name == "retired").values(enabled=True)))
    assert not await store.run(deployments.are_definitions_applied, NEW)


@stored
async def test_the_schedules_of_live_deployments_are_listed_in_name_order(store: Store) -> None:
    await store.run(register)
    await store.run(add, "retired", NEW, enabled=False, pause_reason=REMOVED_FROM_CODE)
    await store.run(add, "old", OLD)
    await store.run(add, "paused", NEW, enabled=False, pause_reason="holidays")
    await store.run(add, "digest", NEW)
    await store.run(add, "theirs", OTHER)
    listed = await store.run(deployments.list_definitions)
    assert listed == {NEW.id: ["digest", "paused"], OTHER.id: ["theirs"]}
