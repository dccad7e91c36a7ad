"""Authentication and the rules of every request: keys, roles, tenants, bodies, idempotency, audit log."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from timebell.api import v1
from timebell.store.audit import audit_log
from timebell.store.tenancy import api_keys

from .web import NIGHTLY, SECRET, is_problem

Make = Callable[..., Any]


async def test_requests_without_a_key_are_served_only_locally(make: Make) -> None:
    async with make(open_here=False) as web:
        is_problem(await web.get("/schedules"), 401, "UNAUTHORIZED")
        assert (await web.get("/schedules", key=await web.key("viewer"))).status_code == 200
    async with make(open_here=True) as web:
        assert (await web.get("/schedules")).status_code == 200
        is_problem(await web.get("/schedules", host="evil.example"), 403, "NOT_LOCAL")
        is_problem(await web.post("/schedules", NIGHTLY, sec_fetch_site="cross-site"), 403, "NOT_LOCAL")


async def test_a_wrong_secret_and_an_unknown_id_get_the_same_response(make: Make) -> None:
    async with make(open_here=False) as web:
        right = await web.key()
        wrong = right[:-16] + ("0" * 16 if right[-16:] != "0" * 16 else "1" * 16)
        answers = [await web.get("/schedules", key=key) for key in (wrong, "tb_live_x_y", "nonsense", "")]
        bodies = [{k: v for k, v in one.json().items() if k != "requestId"} for one in answers]
        assert all(body == bodies[0] for body in bodies)


async def test_wrong_and_missing_keys_never_block_a_valid_key(make: Make) -> None:
    async with make(open_here=False) as web:
        right = await web.key()
        for key in ("wrong", None, "") * 40:
            is_problem(await web.get("/schedules", key=key), 401, "UNAUTHORIZED")
        assert (await web.get("/schedules", key=right)).status_code == 200


async def test_failed_authentications_are_counted_by_reason_and_logged(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with make(open_here=False, proxies="127.0.0.1") as web, web.app.running() as service:
        elsewhere = await web.key(networks=("192.0.2.0/24",))
        for key in ("wrong", "wrong", None, elsewhere):
            is_problem(await web.get("/schedules", key=key, x_forwarded_for="203.0.113.9"), 401, "UNAUTHORIZED")
        assert (await web.get("/schedules", key=elsewhere, x_forwarded_for="192.0.2.5")).status_code == 200
        counted = {reason: count for (reason,), count in service.node.counters.authentication_failures.values.items()}
        assert counted == {
            "missing_key": 1, "wrong_key": 2, "unusable_key": 1, "wrong_signature": 0, "wrong_password": 0,
                "wrong_code": 0,
            "wrong_token": 0, "refused_identity": 0, "throttled": 0,
        }  # fmt: skip
    lines = [line.getMessage() for line in caplog.records if line.name == "timebell.api"]
    assert [line for line in lines if "reason=wrong_key" in line] == [
        "authentication failed reason=wrong_key address=203.0.113.9 not_logged_since=0"
    ]
    assert not any("missing_key" in line for line in lines)


async def test_the_audit_log_and_key_networks_use_the_client_behind_a_trusted_proxy(make: Make) -> None:
    async with make(open_here=False, proxies="127.0.0.0/8, 10.0.0.0/8") as web:
        key = await web.key("editor", networks=("198.51.100.0/24",))
        headers = {"x_forwarded_for": "1.2.3.4, 198.51.100.7, 10.1.1.1"}
        assert (await web.post("/schedules", NIGHTLY, key=key, **headers)).status_code == 201
        [record] = await web.app.store.run(audit_log.list_records, "default", 50, None)
        assert record.address == "198.51.100.7"


async def test_forwarded_headers_of_other_peers_are_ignored_and_counted(make: Make) -> None:
    async with make(open_here=False, proxies="192.0.2.1") as web, web.app.running() as service:
        key = await web.key(networks=("198.51.100.0/24",))
        refused = await web.get("/schedules", key=key, x_forwarded_for="198.51.100.7")
        is_problem(refused, 401, "UNAUTHORIZED")
        assert service.node.counters.forwarded_headers_ignored == 1


async def test_a_key_in_the_url_is_refused(make: Make) -> None:
    async with make(open_here=False) as web:
        is_problem(await web.get(f"/schedules?api_key={await web.key()}"), 400, "KEY_IN_URL")


async def test_a_key_sees_only_its_tenant(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, theirs = await web.key("admin", "ours"), await web.key("admin", "theirs")
        id_ = (await web.post("/schedules", NIGHTLY, key=ours)).json()["id"]
        assert (await web.get("/schedules", key=theirs)).json()["items"] == []
        other = await web.get(f"/schedules/{id_}", key=theirs)
        gone = await web.get(f"/schedules/{id_[:-1]}{'0' if id_[-1] != '0' else '1'}", key=theirs)
        problems = [{k: v for k, v in one.json().items() if k != "requestId"} for one in (other, gone)]
        assert problems[0]["detail"].replace(id_, "?") == problems[1]["detail"].replace(
            gone.url.path.rpartition("/")[2], "?"
        )
        assert other.status_code == gone.status_code == 404
        is_problem(await web.get("/schedules?tenant=ours", key=theirs), 403, "TENANT_FORBIDDEN")
        everywhere = await web.key("platform", None)
        assert [one["id"] for one in (await web.get("/schedules?tenant=ours", key=everywhere)).json()["items"]] == [id_]


async def test_roles_are_enforced(make: Make) -> None:
    async with make(open_here=False) as web:
        viewer, operator, editor = [await web.key(role) for role in ("viewer", "operator", "editor")]
        is_problem(await web.post("/schedules", NIGHTLY, key=viewer), 403, "ROLE_TOO_LOW")
        is_problem(await web.post("/schedules", NIGHTLY, key=operator), 403, "ROLE_TOO_LOW")
        id_ = (await web.post("/schedules", NIGHTLY, key=editor)).json()["id"]
        is_problem(await web.post(f"/schedules/{id_}/pause", key=viewer), 403, "ROLE_TOO_LOW")
        assert (await web.post(f"/schedules/{id_}/pause", key=operator)).status_code == 200


async def test_scopes_expiry_and_networks_are_enforced(make: Make) -> None:
    async with make(open_here=False) as web:
        now = web.app.clock.now()
        is_problem(await web.get("/schedules", key=await web.key(scopes=("jobs",))), 403, "SCOPE_MISSING")
        is_problem(
            await web.get("/schedules", key=await web.key(expires_at=now - timedelta(seconds=1))), 401, "UNAUTHORIZED"
        )
        assert (await web.get("/schedules", key=await web.key(networks=("127.0.0.0/8",)))).status_code == 200
        is_problem(await web.get("/schedules", key=await web.key(networks=("192.0.2.0/24",))), 401, "UNAUTHORIZED")


async def test_a_revoked_key_is_refused_within_5_s(make: Make) -> None:
    async with make(open_here=False) as web:
        key = await web.key()
        assert (await web.get("/schedules", key=key)).status_code == 200
        await web.app.store.run(api_keys.revoke_key, "default", key.split("_")[2], web.app.clock.now())
        began = requested = web.app.clock.monotonic()
        while (await web.get("/schedules", key=key)).status_code == 200:
            assert requested - began < 5
            await asyncio.sleep(0.05)
            requested = web.app.clock.monotonic()  # a stalled machine may request late, which is not a failure


async def test_a_repeated_request_gets_the_first_response(make: Make) -> None:
    async with make() as web:
        first = await web.post("/schedules", NIGHTLY, idempotency_key="one")
        again = await web.post("/schedules", NIGHTLY, idempotency_key="one")
        assert (again.status_code, again.content) == (201, first.content)
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["etag"] == first.headers["etag"]
        is_problem(
            await web.post("/schedules", {**NIGHTLY, "name": "b"}, idempotency_key="one"), 422, "IDEMPOTENCY_KEY_REUSED"
        )
        assert len((await web.get("/schedules")).json()["items"]) == 1


async def test_equal_json_is_the_same_request_for_an_idempotency_key(make: Make) -> None:
    async with make() as web:
        first = await web.post("/schedules", NIGHTLY, idempotency_key="one")
        reordered = json.dumps(dict(reversed(NIGHTLY.items())), indent=4).encode()
        again = await web.post("/schedules", reordered, idempotency_key="one")
        assert (again.status_code, again.content) == (201, first.content)


async def test_an_idempotency_key_survives_the_rotation_of_the_secret_key(make: Make) -> None:
    async with make() as web:
        first = await web.post("/schedules", NIGHTLY, idempotency_key="one")
        web.app.settings = replace(web.app.settings, secret_key=f"another secret key of the tests,{SECRET}")
        again = await web.post("/schedules", NIGHTLY, idempotency_key="one")
        assert (again.status_code, again.content) == (201, first.content)


async def test_idempotency_keys_work_for_every_change(make: Make) -> None:
    async with make() as web:
        created = (await web.post("/schedules", NIGHTLY)).json()
        path = f"/schedules/{created['id']}"
        for method, body, headers in (
            ("PATCH", {"priority": 3}, {"if_match": '"1"'}),
            ("PUT", {**NIGHTLY, "priority": 4}, {"if_match": '"2"'}),
            ("DELETE", None, {"if_match": '"3"'}),
        ):
            where = "/schedules/by-name/nightly" if method == "PUT" else path
            first = await web.ask(method, where, body, idempotency_key=method, **headers)
            again = await web.ask(method, where, body, idempotency_key=method, **headers)
            assert first.is_success, first.text
            assert (again.status_code, again.content) == (first.status_code, first.content)
            assert again.headers["idempotency-replayed"] == "true"


async def test_another_query_is_another_request_for_an_idempotency_key(make: Make) -> None:
    async with make() as web:
        id_ = (await web.post("/schedules", NIGHTLY)).json()["id"]
        path = f"/schedules/{id_}/overrides"
        first, second = [one["utc"] for one in (await web.get(f"/schedules/{id_}/next?count=2")).json()["items"]]
        for at in (first, second):
            assert (await web.post(path, {"at": at, "action": "skip"})).status_code == 200
        assert (await web.ask("DELETE", f"{path}?at={first}", idempotency_key="one")).is_success
        reused = await web.ask("DELETE", f"{path}?at={second}", idempotency_key="one")
        is_problem(reused, 422, "IDEMPOTENCY_KEY_REUSED")


async def test_concurrent_requests_with_one_idempotency_key_take_effect_once(make: Make) -> None:
    async with make() as web:
        answers = await asyncio.gather(*(web.post("/schedules", NIGHTLY, idempotency_key="same") for _ in range(8)))
        assert {one.status_code for one in answers} == {201}
        assert len({one.content for one in answers}) == 1
        assert sum("idempotency-replayed" in one.headers for one in answers) == 7


async def test_a_refused_request_leaves_its_idempotency_key_unused(make: Make) -> None:
    async with make() as web:
        is_problem(
            await web.post("/schedules", {**NIGHTLY, "timezone": "X"}, idempotency_key="k"), 422, "INVALID_TIMEZONE"
        )
        assert (await web.post("/schedules", NIGHTLY, idempotency_key="k")).status_code == 201


async def test_every_change_leaves_one_audit_record_and_refusals_none(make: Make) -> None:
    async with make(open_here=False) as web:
        key = await web.key("editor", "acme")
        id_ = (await web.post("/schedules", NIGHTLY, key=key)).json()["id"]
        await web.post("/schedules", NIGHTLY, key=key)
        await web.post(f"/schedules/{id_}/pause", key=key)
        await web.get(f"/schedules/{id_}", key=key)
        records = list(await web.app.store.run(audit_log.list_records, "acme", 50, None))
        assert [(one.action, one.subject) for one in records] == [("schedule.pause", id_), ("schedule.create", id_)]
        assert records[0].key_id == key.split("_")[2]
        assert records[0].address == "127.0.0.1"
        assert records[0].before != records[0].after


async def test_invalid_bodies_are_refused_before_anything_is_written(make: Make) -> None:
    deep = b'{"jobPayload":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    cases = [
        (b"x" * 300_000, 413, "BODY_TOO_LARGE"),
        (deep[:200_000], 422, "PAYLOAD_TOO_DEEP"),
        (b'{"name":"a","name":"b"}', 422, "PAYLOAD_NOT_JSON"),
        (b'{"jobPayload":NaN}', 422, "PAYLOAD_NOT_JSON"),
        (b'{"jobPayload":"\\u0000"}', 422, "PAYLOAD_NOT_JSON"),
        (b'{"jobPayload":"\\ud800"}', 422, "PAYLOAD_NOT_JSON"),
        (b'{"priority":' + b"9" * 5000 + b"}", 422, "PAYLOAD_NOT_JSON"),
        (b"{", 400, "INVALID_JSON"),
        (b"[]", 422, "INVALID_FIELDS"),
        (b"", 422, "INVALID_FIELDS"),
    ]
    async with make() as web:
        for body, status, code in cases:
            is_problem(await web.ask("POST", "/schedules", body), status, code)
        is_problem(await web.ask("POST", "/schedules", b"{}", content_type="text/plain"), 415, "MEDIA_TYPE_UNSUPPORTED")
        is_problem(await web.ask("POST", "/schedules", b"{}", content_encoding="gzip"), 415, "MEDIA_TYPE_UNSUPPORTED")


async def test_every_operation_with_a_body_limits_it_and_refuses_invalid_json(make: Make) -> None:
    bodies = [
        (method, re.sub(r"\{\w+\}", "x", path.removeprefix("/api/v1")))
        for path, methods in v1.build_openapi()["paths"].items() for method, details in methods.items()
        if "application/json" in details.get("requestBody", {}).get("content", ())
    ]  # fmt: skip
    assert len(bodies) > 60
    async with make() as web:
        for method, path in bodies:
            is_problem(await web.ask(method.upper(), path, b"{"), 400, "INVALID_JSON")
            is_problem(await web.ask(method.upper(), path, b" " * 300_000), 413, "BODY_TOO_LARGE")


@pytest.mark.parametrize("operation", [
    (path, method) for path, methods in v1.build_openapi()["paths"].items() for method in methods
])  # fmt: skip
def test_every_operation_declares_its_role_and_action(operation: tuple[str, str]) -> None:
    path, method = operation
    details = v1.build_openapi()["paths"][path][method]
    assert details["x-role"] in ("viewer", "operator", "editor", "admin", "platform")
    # Reports of workers and apps are part of the history of jobs and campaigns.
    reports = path.startswith(("/api/v1/claims", "/api/v1/opens"))
    changes = method != "get" and not reports and not path.endswith(("/preview", "/heartbeat", "/count"))
    assert ("x-action" in details) == changes
