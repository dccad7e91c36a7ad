"""Sources and triggers are checked against the database of the source before they are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from timebell import Timebell
from timebell.errors import InvalidInput

from .test_sql_sources import Rows, both

IS_REMINDED = "SELECT 1 FROM duty_schedules WHERE id = :id AND status = :recipient AND start_at = :start_at"


async def _is_refused(change: Awaitable[Any], code: str, *texts: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        await change
    assert refused.value.code == code, refused.value
    assert all(text in str(refused.value) for text in texts), refused.value


@both
async def test_unknown_names_are_refused_with_the_nearest_one(rows: Rows, app: Timebell) -> None:
    table = {"url": rows.url, "table": "duty_schedules"}
    for options, text in (
        ({"table": "duty_schedule"}, "Did you mean duty_schedules?"),
        ({"key": "idd"}, "Did you mean id?"),
        ({"changes": "cursor", "cursor": "update_at"}, "Did you mean updated_at?"),
        ({"query": "SELECT * FROM duty_schedules WHERE"}, "The source cannot be read"),
        ({"query": "SELECT id, startat FROM duty_schedules"}, "startat"),
    ):
        change = app.triggers.put_source("duty", "sql", {**table, **options})
        await _is_refused(change, "INVALID_SOURCE_OPTIONS", text)
    await app.triggers.put_source("duty", "sql", table)  # has no rows, and was never read by an engine
    put = partial(app.triggers.put, "start", "duty", topic="t")
    rules: tuple[tuple[dict[str, Any], str], ...] = (
        ({"column": "startAt"}, "Did you mean start_at?"),
        ({"column": "start_at", "zone_column": "tz"}, "The columns are id, "),
        ({"column": "start_at", "condition": {"stats": "on"}}, "Did you mean status?"),
        ({"column": "start_at", "recipients": "user"}, "Did you mean users?"),
    )
    for rule, text in rules:
        await _is_refused(put(**rule), "UNKNOWN_COLUMN", text)
    for unless, text in (
        (IS_REMINDED.replace("duty_schedules", "duties"), "duties"),
        (IS_REMINDED.replace(":id", ":idd"), "Did you mean id?"),
        (IS_REMINDED.replace("status =", "stats ="), "stats"),
    ):
        await _is_refused(put(column="start_at", unless=unless), "INVALID_CONDITION", text)
    await put(column="start_at", unless=IS_REMINDED)
    renamed = {**table, "query": "SELECT id, start_at AS begins FROM duty_schedules"}
    await _is_refused(app.triggers.put_source("duty", "sql", renamed), "UNKNOWN_COLUMN", "'start'", "begins")


def test_a_source_that_does_not_answer_is_stored_unchecked(tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        theirs = {"url": f"sqlite:///{tmp_path}/theirs.db", "table": "shifts"}
        await app.triggers.put_source("later", "sql", theirs)
        await app.triggers.put("start", "later", "at", "t", unless="SELECT 1 FROM nowhere")
        await app.triggers.put_source("secret", "sql", {**theirs, "url": {"secret": "not-there-yet"}})
        (tmp_path / "theirs.db").touch()
        await app.triggers.put_source("later", "sql", theirs)  # unchanged
        with pytest.raises(InvalidInput, match="no such table"):
            await app.triggers.put_source("later", "sql", {**theirs, "key": "number"})
        await app.close()

    asyncio.run(body())
