"""Generated requests, valid and invalid, against a running server: each response conforms to the OpenAPI document.

`make test-all` sends more requests.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans, sampled_from
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.rotation import rotated
from timebell import Timebell
from timebell.api import server, v1
from timebell.engine.waiting_claims import ClaimRequest
from timebell.features import FEATURES
from timebell.store.jobs.remote_claims import RemoteClaim
from timebell.store.open import upgrade
from timebell.store.tenancy import api_keys as key_rows
from timebell.targets.base import Delivery, Outcome
from timebell.targets.http import HttpTarget

from .ndjson import LATER
from .web import NIGHTLY, SECRET, Web

CHECKS: list[CheckFunction] = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip
MAKES = {"createSchedule", "putSchedule", "previewSchedule"}
RULES = {"interval", "rrule", "dates", "recurrence", "topic", "payload", "retry"}  # fields that conflict with NIGHTLY
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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve without keys for this machine; yield the base URL."""
    with serve(f"sqlite:///{tmp_path_factory.mktemp('schemathesis')}/timebell.db", allow_local=True) as (base, _):
        yield base


@contextmanager
def serve(url: str, *, allow_local: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Serve on SQLite in a separate thread; yield the base URL and keys by what they are."""
    asyncio.run(upgrade(url, FEATURES))
    app = Timebell(url, timezone="UTC")
    app.settings = replace(app.settings, secret_key=SECRET)
    app._targets_by_kind["http"] = UnsentHttpTarget(None, now=app.clock.now)
    claims = app.remote_workers.waiting_claims
    claims.wait = partial(_wait_briefly, claims.wait)  # type: ignore[method-assign]
    listening = server.bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    loop, stop, began = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    keys: dict[str, str] = {}

    async def serve() -> None:
        site = server.HttpApp(app, [v1.build_routes(app.features)], allow_local=allow_local)
        async with server.serving(site, listening):
            keys.update(await _create_keys(Web(app, None, site)))  # type: ignore[arg-type]  # sends nothing
            began.set()
            await stop.wait()
        await app.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert began.wait(60)
    try:
        yield f"http://127.0.0.1:{port}", keys
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


async def _wait_briefly(wait: Callable[..., Awaitable[RemoteClaim]], request: ClaimRequest, *args: Any) -> RemoteClaim:
    """Wait a hundredth of the requested time for due jobs: most generated claims request the default, 30 s."""
    return await wait(replace(request, wait=request.wait / 100), *args)


async def _create_keys(web: Web) -> dict[str, str]:
    """Return keys: valid ones, valid ones with few permissions, and unusable ones."""
    await web.app.open()
    now = web.app.clock.now()
    revoked = await web.key()
    await web.app.store.run(key_rows.revoke_key, "default", revoked.split("_")[2], now)
    return {
        "platform": await web.key("platform", None), "other tenant": await web.key("admin", "elsewhere"),
        "viewer": await web.key("viewer"), "without scope": await web.key(scopes=("forecast",)),
        "revoked": revoked, "expired": await web.key(expires_at=now - timedelta(seconds=1)),
        "other network": await web.key(networks=("192.0.2.0/24",)),
    }  # fmt: skip


def create_objects(base: str, key: str | None = None) -> dict[str, str]:
    """Create objects for the paths; return their ids by collection."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx2.Client(base_url=f"{base}/api/v1", timeout=60, verify=False, headers=headers) as client:
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
    names = create_objects(base)
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
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {names['mine']}"}
        case.query = {name: value for name, value in (case.query or {}).items() if name != "tenant"}
        case.call_and_validate(base_url=base, checks=CHECKS, timeout=60)

    sent()


@pytest.mark.parametrize("name", rotated(OPERATIONS, sorted(OPERATIONS)[::2]))
def test_generated_requests_get_documented_responses(name: str, base: str) -> None:
    _send(name, base, 8)


@pytest.mark.soak  # ten minutes together
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_generated_requests_get_documented_responses(name: str, base: str) -> None:
    _send(name, base, 200)


CASES = 10_000
LIMITED = ("other tenant", "viewer", "without scope")  # valid keys
UNUSABLE = ("revoked", "expired", "other network")
FORGED = (  # values of Authorization that are not a key
    None, "", "Bearer", "Bearer ", "Bearer x", "Basic dGltZWJlbGw6dGltZWJlbGw=",
    "bearer tb_live_0123456789ab_" + "0" * 56,
    "Bearer " + "a" * 8000, "Bearer tb_live__", "Digest tb", "Bearer null",
)  # fmt: skip


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str], dict[str, str]]]:
    """Serve with keys only; yield the base URL, the keys, and the ids of objects."""
    with serve(f"sqlite:///{tmp_path_factory.mktemp('forged')}/timebell.db", allow_local=False) as (base, keys):
        yield base, keys, create_objects(base, keys["platform"])


STATUSES: Counter[tuple[str, int]] = Counter()


@pytest.mark.soak  # the next test counts their responses
@pytest.mark.parametrize("name", OPERATIONS)
def test_requests_with_valid_and_forged_credentials(
    name: str, keyed: tuple[str, dict[str, str], dict[str, str]]
) -> None:
    _send_with_credentials(name, OPERATIONS[name], *keyed, STATUSES)


@pytest.mark.soak
def test_ten_thousand_requests_had_no_5xx_and_no_429_for_the_valid_key() -> None:
    """Print the responses of all requests above by credentials and status.

    `pytest -m soak -s tests/api/test_schemathesis.py -k "credentials or valid_key"`
    """
    for (credentials, status), number in sorted(STATUSES.items()):
        print(f"{credentials:>7} {status} {number:>6}")
    print(f"  total     {STATUSES.total():>6}")
    assert not [status for _, status in STATUSES if status >= 500]
    assert not [
        credentials for credentials in ("valid", "limited") for status in (401, 429) if STATUSES[credentials, status]
    ]
    assert not [status for credentials, status in STATUSES if credentials == "forged" and status < 400]
    assert STATUSES.total() >= CASES


def _send_with_credentials(
    name: str, operation: Any, base: str, keys: dict[str, str], names: dict[str, str],
    statuses: Counter[tuple[str, int]],
) -> None:  # fmt: skip
    existing = names.get(operation.path.split("/")[3], "nothing")
    authorizations: list[tuple[str, str | None]] = [("forged", text) for text in FORGED]
    authorizations += [("forged", f"Bearer {keys[name]}") for name in UNUSABLE]
    authorizations += [("limited", f"Bearer {keys[name]}") for name in LIMITED]
    authorizations += [("valid", f"Bearer {keys['platform']}")] * len(authorizations)
    fits, other = (
        operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )

    @settings(
        max_examples=CASES // len(OPERATIONS) + 1, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(fits | other, booleans(), sampled_from(authorizations))
    def sent(case: Any, real: bool, authorization: tuple[str, str | None]) -> None:
        if real:
            case.path_parameters = dict.fromkeys(case.path_parameters or {}, existing)
            case.headers = {**(case.headers or {}), "If-Match": "*"}
        headers = {header: text for header, text in (case.headers or {}).items() if header.lower() != "authorization"}
        credentials, text = authorization
        if text is not None:
            headers["Authorization"] = text.strip()
        case.headers = headers
        case.query = {name: value for name, value in (case.query or {}).items() if name != "tenant"}
        response = case.call(base_url=base, timeout=60)
        statuses[credentials, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    # Hypothesis stops earlier where an operation has few different requests: repeat until it has its share.
    target = statuses.total() + CASES // len(OPERATIONS) + 1
    while statuses.total() < target:
        sent()
