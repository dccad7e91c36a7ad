"""A target that a live job references cannot be deleted, even if the job changes state meanwhile."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sqlalchemy import insert

from timebell.errors import Conflict
from timebell.features import FEATURES
from timebell.model.payload import encode
from timebell.model.routes import named_target
from timebell.store import transaction
from timebell.store.schema import targets as table
from timebell.store.tenancy import targets
from timebell.store.transaction import Transaction

from .helpers import T0, Store, claim, create, job, stored


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@stored
async def test_a_job_that_changes_state_meanwhile_keeps_the_target(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(tx: Transaction) -> None:
        row: dict[str, Any] = {"tenant_id": "default", "name": "n", "kind": "http", "options": "{}"}
        tx.execute(insert(table).values(**row, created_at=T0, updated_at=T0))

    await store.run(put)
    await create(store, job(target=encode(named_target("http", "n"), "target"), route="@http"))
    assert await claim(store)
    seen: list[str] = []

    def again(point: str) -> None:
        seen.append(point)
        with psycopg.connect(store.url, autocommit=True) as connection:
            state = "pending" if len(seen) % 2 else "running"
            connection.execute(f"UPDATE timebell_jobs SET state = '{state}'")  # type: ignore[arg-type]

    monkeypatch.setattr(transaction, "probe", again)
    with pytest.raises(Conflict, match="1 pending job"):
        await store.run(targets.delete_target, "default", "n", T0, FEATURES)
    assert len(seen) > 3
