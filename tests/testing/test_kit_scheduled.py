"""Assertions on pending jobs, and code under test with sockets of its own."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from timebell.testing.kit import Kit


def test_scheduled_jobs_are_found_by_payload_time_and_fields(timebell: Kit) -> None:
    app = timebell.app
    app.on("mail.send")(lambda event: None)
    job = timebell.run(app.schedule_in("mail.send", "1h", payload={"to": "ana", "n": 1}, owner_id="ana", key="k"))
    assert timebell.assert_scheduled("mail.send").id == job.id
    assert timebell.assert_scheduled("mail.send", {"to": "ana"}, at="2027-01-01T01:00Z", key="k").id == job.id
    for arguments in ({"payload": {"to": "ben"}}, {"at": "2027-01-01T02:00Z"}, {"owner_id": "ben"}):
        timebell.assert_not_scheduled("mail.send", **arguments)
        with pytest.raises(AssertionError, match=r"mail\.send at 2027-01-01T01:00:00Z: .*'to': 'ana'"):
            timebell.assert_scheduled("mail.send", **arguments)
    with pytest.raises(AssertionError, match="is scheduled"):
        timebell.assert_not_scheduled("mail.send", {"n": 1})
    timebell.advance(hours=2)
    timebell.assert_not_scheduled("mail.send")
    with pytest.raises(AssertionError, match=r"Did you mean the topic mail\.send"):
        timebell.assert_scheduled("mail.sent")


def test_time_waits_for_a_response_of_a_real_database(timebell: Kit, postgres_url: str) -> None:
    async def query() -> int:
        connection = await asyncpg.connect(postgres_url.replace("+asyncpg", ""))
        try:
            async with asyncio.timeout(5):  # on virtual time
                number: int = await connection.fetchval("SELECT 1 FROM pg_sleep(0.3)")
                return number
        finally:
            await connection.close()

    assert timebell.run(query()) == 1
    timebell.advance(days=1)
