"""The statements of frequent requests on PostgreSQL: each is a round trip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from timebell.store import transaction

JOB = {"topic": "t", "runAt": "2090-01-01T00:00:00Z", "timezone": "UTC", "payload": {"n": 1}}


@pytest.fixture
def store_url(postgres_url: str) -> str:
    return postgres_url


@pytest.fixture
def points() -> Iterator[list[str]]:
    """Record the operation and the number of each statement, and each begin and commit."""
    recorded: list[str] = []
    transaction.probe = recorded.append
    yield recorded
    transaction.probe = None


@pytest.mark.parametrize("labels", [{}, {"clientRequestId": "r{}"}])
async def test_creating_and_recording_a_job_takes_one_statement(
    make: Callable[..., Any], points: list[str], labels: dict[str, str]
) -> None:
    async with make() as web:
        for number in range(3):  # the first requests also read limits and handled topics
            points.clear()
            job = JOB | {"metadata": {name: label.format(number) for name, label in labels.items()}}
            assert (await web.client.post("/jobs", json=job)).status_code == 201
    assert points == ["create_recorded.1", "create_recorded.done"]


async def test_creating_a_job_with_a_key_takes_one_statement_and_recording_it_another(
    make: Callable[..., Any], points: list[str]
) -> None:
    async with make() as web:
        for number in range(3):
            points.clear()
            assert (await web.client.post("/jobs", json=JOB | {"key": f"k{number}"})).status_code == 201
    assert points == ["create.1", "_finish_change.1", "begin.commit", "begin.done"]


async def test_a_list_takes_one_statement(make: Callable[..., Any], points: list[str]) -> None:
    async with make() as web:
        for _ in range(3):
            points.clear()
            assert (await web.client.get("/schedules")).status_code == 200
    assert points == ["list_schedules.1"]
