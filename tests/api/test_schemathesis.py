"""Generated requests, valid and invalid, against a running server: each response conforms to the OpenAPI document.

`make test-all` sends more requests.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from timebell import Timebell
from timebell.api import server, v1
from timebell.store.open import upgrade
from timebell.targets.base import Delivery, Outcome
from timebell.targets.http import HttpTarget

from .web import NIGHTLY, SECRET

CHECKS: list[CheckFunction] = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip
MAKES = {"createSchedule", "putSchedule", "previewSchedule"}
RULES = {"interval", "rrule", "dates", "recurrence", "topic", "payload", "retry"}  # fields that conflict with NIGHTLY
LATER = {"topic": "there", "timezone": "UTC", "runAt": "2040-01-01T00:00:00Z"}
NUMBERS = count()
STREAMING = {"streamEvents"}  # tested in tests/api/test_events.py
SCHEMA = schemathesis.openapi.from_dict(json.loads(v1.render_openapi()))
OPERATIONS = {
    found.ok().definition.raw["operationId"]: found.ok()
    for found in SCHEMA.get_all_operations()
    if found.ok().definition.raw["operationId"] not in STREAMING
}


class UnsentHttpTarget(HttpTarget):
    """An HTTP target that checks its options and sends nothing."""

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        return Outcome.ok({"status": 200, "body": delivery.topic})


@schemathesis.serializer("application/x-ndjson")
def _lines(ctx: Any, value: Any) -> bytes:
    """Return a generated line and a valid one."""
    return f"{value}\n{json.dumps(LATER)}\n".encode(errors="replace")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve on SQLite in a separate thread, without keys for this machine; yield the base URL."""
    url = f"sqlite:///{tmp_path_factory.mktemp('schemathesis')}/timebell.db"
    asyncio.run(upgrade(url))
    app = Timebell(url, timezone="UTC")
    app.settings = replace(app.settings, secret_key=SECRET)
    app.targets_by_kind["http"] = UnsentHttpTarget(None, now=app.clock.now)
    listening = server.bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    loop, stop, began = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with server.serving(server.HttpApp(app, [v1.build_routes(app.features)], allow_local=True), listening):
            began.set()
            await stop.wait()
        await app.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert began.wait(60)
    yield f"http://127.0.0.1:{port}"
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    loop.close()


def _create_objects(base: str) -> dict[str, str]:
    """Create objects for the paths; return their ids by collection."""
    with httpx2.Client(base_url=f"{base}/api/v1", timeout=60, verify=False) as client:
        created = client.put("/schedules/by-name/there", json=NIGHTLY | {"name": "there"}, headers={"If-Match": "*"})
        client.put("/calendars/there", json={"holidays": ["2040-01-02"]})
        client.post("/tenants", json={"id": "there"})
        client.put("/targets/there", json={"kind": "http", "options": {"url": "https://example.com"}})
        client.post("/secrets", json={"name": "there", "value": "v"})
        key = client.post("/keys", json={"name": "there", "role": "viewer"})
        mine = client.post("/keys", json={"name": "mine", "role": "platform"})
        return {
            "schedules": created.json()["id"], "calendars": "there", "tenants": "there", "keys": key.json()["id"],
            "jobs": client.post("/jobs", json=LATER).json()["id"], "queues": "there",
            "targets": "there", "secrets": "there",
            "operations": client.post("/jobs/cancel", json={"filter": {"topic": "none"}}).json()["id"],
            "mine": mine.json()["key"],
        }  # fmt: skip


def _send(name: str, base: str, examples: int) -> None:
    operation: Any = OPERATIONS[name]
    names = _create_objects(base)
    existing = names.get(operation.path.split("/")[3], "nothing")
    fits, other = (
        operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(fits | other, booleans())
    def sent(case: Any, real: bool) -> None:
        if real:  # generated values do not contain existing ids and revisions
            case.path_parameters = dict.fromkeys(case.path_parameters or {}, existing)
            case.headers = {**(case.headers or {}), "If-Match": "*"}
            if name in MAKES and isinstance(case.body, dict):
                rest = {field: value for field, value in case.body.items() if field not in RULES}
                name_given = (case.path_parameters or {}).get("name", f"n{next(NUMBERS)}")
                case.body = dict(list(rest.items())[:3]) | NIGHTLY | {"name": name_given}
        # Wrong keys are tested elsewhere; ten of them would block all further requests.
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {names['mine']}"}
        case.query = {name: value for name, value in (case.query or {}).items() if name != "tenant"}
        case.call_and_validate(base_url=base, checks=CHECKS, timeout=60)

    sent()


@pytest.mark.parametrize("name", OPERATIONS)
def test_generated_requests_get_documented_responses(name: str, base: str) -> None:
    _send(name, base, 15)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_generated_requests_get_documented_responses(name: str, base: str) -> None:
    _send(name, base, 200)
