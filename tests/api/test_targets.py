"""Named targets and their secrets: over HTTP, with an engine and a receiver, on both stores."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

import pytest
import standardwebhooks.webhooks
from sqlalchemy import text as sql
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tests.unit.targets.sink import OLDER, Sink, sink
from timebell import JobSpec
from timebell.engine.service import Service
from timebell.errors import InvalidInput, NotFound
from timebell.store.audit import events
from timebell.store.cluster import gauges
from timebell.store.tenancy import targets
from timebell.store.transaction import Transaction
from timebell.targets.http import HttpTarget
from timebell.tenancy.keys import SCOPES
from timebell.tenancy.secrets import Keyring

from .web import NIGHTLY, SECRET, Web, is_problem, wait_until

Make = Callable[..., Any]
LATER = "2040-01-01T00:00:00Z"
on_sqlite_only = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
"""For tests that do not depend on the store."""


@asynccontextmanager
async def delivering(make: Make, **options: Any) -> AsyncIterator[tuple[Web, Sink, Service]]:
    """Run an engine that delivers to named targets on this machine."""
    async with make(timezone="UTC", **options) as web, sink() as receiver:
        web.app.settings = replace(web.app.settings, webhook_allow_private=True)
        async with web.app.running(heartbeat=0.1) as service:
            yield web, receiver, service


async def target(web: Web, receiver: Sink, path: str = "status/200", name: str = "orders", **options: Any) -> Any:
    """Put a target and return the response."""
    url = f"http://127.0.0.1:{receiver.port}/{path}"
    put = await web.ask("PUT", f"/targets/{name}", {"kind": "http", "options": {"url": url, **options}})
    assert put.status_code == 200, put.text
    return put.json()


async def delivered(web: Web, service: Service, given: Any = "orders", **fields: Any) -> Any:
    """Create a job for the target and return it once it is finished."""
    made = await web.post("/jobs", {"topic": "t.t", "timezone": "UTC", "maxRetries": 0, "target": given, **fields})
    assert made.status_code == 201, made.text
    await service.wait_until_idle()
    return (await web.get(f"/jobs/{made.json()['id']}")).json()


async def test_a_named_target_is_resolved_at_delivery(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        made = await target(web, receiver, "status/200?first")
        assert made["revision"] == 1
        await web.post("/queues/default/pause", {})
        jobs = [
            (await web.post("/jobs", {"topic": "t.t", "timezone": "UTC", "target": given})).json()
            for given in ("orders", {"name": "orders"})
        ]
        assert [one["target"] for one in jobs] == [{"name": "orders"}] * 2
        again = await target(web, receiver, "status/200?second")
        assert (again["revision"], again["signingSecret"]) == (2, None)
        assert (await target(web, receiver, "status/200?second"))["revision"] == 2  # an identical put is no edit
        await web.post("/queues/default/resume")
        await service.wait_until_idle()
        assert [one.line.split("?")[1] for one in receiver.requests] == ["second HTTP/1.1"] * 2
        job = (await web.get(f"/jobs/{jobs[0]['id']}")).json()
        assert (job["status"], job["result"]["status"], job["target"]) == ("completed", 200, {"name": "orders"})
        (attempt,) = job["attempts"]
        assert attempt["target"] == {"name": "orders", "kind": "http", "revision": 2}
        assert (attempt["attempt"], attempt["code"], attempt["error"]) == (1, None, None)


async def test_schedules_keep_their_named_target_through_edits(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        await target(web, receiver)
        made = (await web.post("/schedules", {**NIGHTLY, "target": "orders"})).json()
        assert made["target"] == {"name": "orders"}
        ran = await web.post(f"/schedules/{made['id']}/trigger")
        await service.wait_until_idle()
        assert (await web.get(f"/jobs/{ran.json()['id']}")).json()["status"] == "completed"
        assert Webhook((await rotated(web))["signingSecret"])
        edited = await web.ask("PATCH", f"/schedules/{made['id']}", {"description": "x"}, if_match="*")
        assert edited.json()["target"] == {"name": "orders"}
        is_problem(await web.ask("DELETE", "/targets/orders"), 409, "TARGET_IN_USE")
        elsewhere = await web.ask("PATCH", f"/schedules/{made['id']}", {"target": None}, if_match="*")
        assert elsewhere.json()["target"] is None
        assert (await web.ask("DELETE", "/targets/orders")).status_code == 200
        reverted = await web.post(f"/schedules/{made['id']}/revert", {"revision": 1})
        is_problem(reverted, 404, "TARGET_NOT_FOUND")


async def rotated(web: Web, **body: Any) -> Any:
    answer = await web.post("/targets/orders/rotate-secret", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_an_unknown_target_is_refused_at_creation(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        await target(web, receiver)
        for given in ("order", {"name": "order"}):
            is_problem(await web.post("/jobs", {"topic": "t.t", "target": given}), 404, "TARGET_NOT_FOUND")
        is_problem(await web.post("/schedules", {**NIGHTLY, "target": "order"}), 404, "TARGET_NOT_FOUND")
        mixed = {"name": "orders", "url": "https://example.com"}
        is_problem(await web.post("/jobs", {"topic": "t.t", "target": mixed}), 422, "INVALID_TARGET_OPTIONS")
        lines = [{"topic": "t.t", "runAt": LATER, "target": name} for name in ("orders", "order", "orders")]
        body = "\n".join(map(json.dumps, ({**line, "key": f"k{at}"} for at, line in enumerate(lines)))).encode()
        done = (await web.post("/jobs/bulk", body, content_type="application/x-ndjson")).json()
        assert (done["progress"]["done"], done["progress"]["failed"]) == (2, 1)
        assert [(one["line"], one["code"]) for one in done["errors"]] == [(2, "TARGET_NOT_FOUND")]
        with pytest.raises(NotFound):
            await web.app.schedule_many([JobSpec(topic="t.t", target=name) for name in ("orders", "order")])
        with pytest.raises(NotFound):  # names belong to a tenant
            await web.app.schedule_at("t.t", target="orders", tenant_id="another")
        waiting = (await web.get("/jobs?status=pending")).json()["items"]
        assert len(waiting) == 2


async def test_a_target_in_use_cannot_be_deleted_and_its_uses_are_counted(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        await target(web, receiver)
        await web.post("/schedules", {**NIGHTLY, "target": "orders"})
        jobs = [(await web.post("/jobs", {"topic": "t.t", "runAt": LATER, "target": "orders"})).json() for _ in "ab"]
        refused = is_problem(await web.ask("DELETE", "/targets/orders"), 409, "TARGET_IN_USE")
        assert "1 schedule and 2 pending jobs" in refused["detail"]
        for one in jobs:
            await web.post(f"/jobs/{one['id']}/cancel")
        assert (
            "0 pending jobs" in is_problem(await web.ask("DELETE", "/targets/orders"), 409, "TARGET_IN_USE")["detail"]
        )
        await target(web, receiver, name="lone")
        alone = (await web.post("/jobs", {"topic": "t.t", "runAt": LATER, "target": "lone"})).json()
        refused = is_problem(await web.ask("DELETE", "/targets/lone"), 409, "TARGET_IN_USE")
        assert "0 schedules and 1 pending job." in refused["detail"]
        await web.post(f"/jobs/{alone['id']}/cancel")
        assert (await web.ask("DELETE", "/targets/lone")).status_code == 200
        is_problem(await web.post("/targets", {"name": "orders", **_http("https://x.io")}), 409, "TARGET_EXISTS")
        other = {"kind": "command", "options": {"argv": ["/bin/true"]}}
        web.app.settings = replace(web.app.settings, command_enabled=True)
        is_problem(await web.ask("PUT", "/targets/orders", other), 409, "TARGET_KIND_FIXED")


def _http(url: str, **options: Any) -> dict[str, Any]:
    return {"kind": "http", "options": {"url": url, **options}}


async def test_a_410_response_disables_the_target_until_it_is_enabled(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        await target(web, receiver, "status/410")
        first = await delivered(web, service, maxRetries=3)
        assert (first["status"], first["errorCode"], first["attemptsMade"]) == ("failed", "HTTP_STATUS", 1)
        fetched = (await web.get("/targets/orders")).json()
        assert fetched["disabledAt"] is not None
        assert "410" in fetched["disabledReason"]
        seen = await web.app.store.run(gauges.read_gauges, web.app.clock.now(), 10.0)
        assert seen.disabled_targets == 1
        (record,) = (await web.get("/audit-log?action=target.disable")).json()["items"]
        assert (record["actor"], record["subject"]) == ("timebell", "orders")
        place = (web.app.clock.now() - timedelta(hours=1), "00000000-0000-0000-0000-000000000000")
        happened = await web.app.store.run(
            events.list_events_after, events.EventFilter("default", types=["target.*"]), place, 50
        )
        assert ("target.disable", "orders") in [(one.type, one.subject) for one in happened]
        second = await delivered(web, service, maxRetries=3)
        assert (second["status"], second["errorCode"], second["attemptsMade"]) == ("failed", "TARGET_DISABLED", 1)
        assert len(receiver.requests) == 1  # no further request was sent
        await target(web, receiver, "status/200")  # an edit does not enable the target
        assert (await delivered(web, service))["errorCode"] == "TARGET_DISABLED"
        tried = (await web.post("/targets/orders/test")).json()
        assert tried["delivered"]  # a test works while the target is disabled
        assert (await web.post("/targets/orders/enable")).json()["disabledAt"] is None
        await web.post("/dead-letters/retry", {"filter": {"errorCode": "TARGET_DISABLED"}})

        async def retried() -> bool:
            return bool((await web.get(f"/jobs/{second['id']}")).json()["status"] == "completed")

        await wait_until(retried)
        assert (await web.app.store.run(gauges.read_gauges, web.app.clock.now(), 10.0)).disabled_targets == 0


async def test_a_response_to_an_older_revision_disables_nothing(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        await target(web, receiver, "status/410")
        await target(web, receiver, "status/200")
        now = web.app.clock.now()
        assert not await web.app.store.run(targets.disable_target, "default", "orders", 1, "old news", now)
        assert (await web.get("/targets/orders")).json()["disabledAt"] is None


async def test_secrets_in_options_are_sent_but_never_returned(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        await web.post("/secrets", {"name": "token", "value": "sesame-open"})
        headers = {"authorization": {"secret": "token"}, "x-team": "billing"}
        made = await target(web, receiver, "echo", headers=headers)
        assert made["options"]["headers"] == headers
        job = await delivered(web, service)
        assert receiver.requests[-1].headers["authorization"] == "sesame-open"
        assert job["status"] == "completed"
        assert "sesame" not in json.dumps(job)  # although the receiver returned it
        assert '"authorization": "***"' in job["result"]["body"]
        tried = (await web.post("/targets/orders/test")).json()
        assert tried["request"]["headers"]["authorization"] == "***"
        assert "sesame" not in json.dumps(tried)
        await web.ask("PUT", "/secrets/token", {"value": "simsalabim"})
        await delivered(web, service)
        assert receiver.requests[-1].headers["authorization"] == "simsalabim"
        refused = is_problem(await web.ask("DELETE", "/secrets/token"), 409, "SECRET_IN_USE")
        assert "orders" in refused["detail"]
        await target(web, receiver)
        assert (await web.ask("DELETE", "/secrets/token")).status_code == 200
        unknown = _http("https://example.com", headers={"a": {"secret": "token"}})
        is_problem(await web.ask("PUT", "/targets/other", unknown), 404, "SECRET_NOT_FOUND")
        await web.post("/secrets", {"name": "bad", "value": "line\nbreak"})
        unfit = _http("https://example.com", headers={"a": {"secret": "bad"}})
        problem = is_problem(await web.ask("PUT", "/targets/other", unfit), 422, "INVALID_HEADER")
        assert "break" not in json.dumps(problem)
        for at, url in enumerate(("ftp://example.com/sesame", "https://sesame.example:25/")):
            await web.post("/secrets", {"name": f"url-{at}", "value": url})
            hidden = {"kind": "http", "options": {"url": {"secret": f"url-{at}"}}}
            refused = await web.ask("PUT", "/targets/other", hidden)
            assert refused.status_code in (403, 422)
            assert "sesame" not in refused.text


@on_sqlite_only
async def test_secrets_are_masked_in_the_error_of_a_target_check(make: Make) -> None:
    class EchoingTarget(HttpTarget):
        def check(self, options: dict[str, Any]) -> dict[str, Any]:
            raise InvalidInput(f"{options} are invalid.", code="INVALID_URL", fix=f"Not {options['url']}.")

    async with make() as web:
        web.app._targets_by_kind["http"] = EchoingTarget(None, now=web.app.clock.now)
        await web.post("/secrets", {"name": "token", "value": "sesame"})
        hidden = {"kind": "http", "options": {"url": {"secret": "token"}}}
        refused = is_problem(await web.ask("PUT", "/targets/orders", hidden), 422, "INVALID_URL")
        assert "sesame" not in json.dumps(refused)
        assert "***" in refused["detail"]


@on_sqlite_only
async def test_a_test_delivery_returns_its_request_and_response(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        secret = (await target(web, receiver, "status/200"))["signingSecret"]
        tried = (await web.post("/targets/orders/test")).json()
        assert tried["delivered"]
        headers = {"content-length": "13", "location": "/status/200"}
        assert tried["response"] == {"status": 200, "headers": headers, "body": '{"said":"hi"}'}
        assert tried["latencyMs"] >= 0
        assert tried["request"]["url"].endswith("/status/200")
        assert tried["request"]["body"].encode() == receiver.requests[-1].body
        sent = {
            name: value for name, value in receiver.requests[-1].headers.items() if name in tried["request"]["headers"]
        }
        assert tried["request"]["headers"] == sent
        event = Webhook(secret).verify(tried["request"]["body"].encode(), tried["request"]["headers"])
        assert (event["subject"], event["data"]["payload"]) == ("timebell.test", {"test": True})
        await target(web, receiver, "status/500")
        failed = (await web.post("/targets/orders/test")).json()
        assert (failed["delivered"], failed["errorCode"]) == (False, "HTTP_STATUS")
        assert failed["request"]["body"]
        records = (await web.get("/audit-log?action=target.test")).json()["items"]
        assert [one["subject"] for one in records] == ["orders"] * 2
        is_problem(await web.post("/targets/unknown/test"), 404, "TARGET_NOT_FOUND")


@on_sqlite_only
async def test_a_new_signing_secret_is_returned_once(make: Make) -> None:
    async with make() as web:
        body = {"name": "orders", **_http("https://example.com/x")}
        first = await web.post("/targets", body, idempotency_key="k")
        secret = first.json()["signingSecret"]
        assert secret.startswith("whsec_")
        assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
        again = await web.post("/targets", body, idempotency_key="k")
        assert again.headers["idempotency-replayed"] == "true"
        assert again.json() == {**first.json(), "signingSecret": None}
        for path in ("/targets", "/targets/orders"):
            assert secret not in (await web.get(path)).text
        own = await web.post("/targets", {"name": "own", **_http("https://example.com"), "signingSecret": OLDER})
        assert own.json()["signingSecret"] == OLDER
        refused_update = await web.ask("PUT", "/targets/own", {**_http("https://example.com"), "signingSecret": OLDER})
        is_problem(refused_update, 422, "SIGNING_SECRET_FIXED")
        weak = {"name": "weak", **_http("https://example.com"), "signingSecret": "whsec_QUJD"}
        problem = is_problem(await web.post("/targets", weak), 422, "INVALID_SIGNING_SECRET")
        assert "QUJD" not in json.dumps(problem)
        for name in ("a/b", "", " a", "a" * 101, "ä"):
            refused = await web.post("/targets", {"name": name, **_http("https://example.com")})
            assert (refused.status_code, refused.json()["code"] in ("INVALID_NAME", "INVALID_FIELDS")) == (422, True)
        private = await web.post("/targets", {"name": "in", **_http("https://10.0.0.1/")})
        is_problem(private, 403, "PRIVATE_ADDRESS")
        smuggled = _http("https://example.com", signingSecrets=[OLDER])
        is_problem(await web.ask("PUT", "/targets/x", smuggled), 422, "INVALID_TARGET_OPTIONS")
        inline = {"topic": "t.t", "timezone": "UTC", "target": {**smuggled["options"], "kind": "http"}}
        is_problem(await web.post("/jobs", inline), 422, "INVALID_TARGET_OPTIONS")


@on_sqlite_only
async def test_targets_and_secrets_require_their_roles(make: Make) -> None:
    async with make(open_here=False) as web:
        keys = {role: await web.key(role) for role in ("viewer", "operator", "editor", "admin")}
        await web.post("/secrets", {"name": "token", "value": "sesame"}, key=keys["admin"])
        for role in ("viewer", "operator"):
            is_problem(await web.get("/secrets", key=keys[role]), 403, "ROLE_TOO_LOW")
        is_problem(await web.post("/secrets", {"name": "x", "value": "y"}, key=keys["editor"]), 403, "ROLE_TOO_LOW")
        plain, with_secret = (
            _http("https://example.com"),
            _http("https://example.com", headers={"a": {"secret": "token"}}),
        )
        assert (await web.ask("PUT", "/targets/plain", plain, key=keys["editor"])).status_code == 200
        # A key that can choose the destination of a secret could read it there.
        is_problem(await web.ask("PUT", "/targets/plain", with_secret, key=keys["editor"]), 403, "ROLE_TOO_LOW")
        assert (await web.ask("PUT", "/targets/secretive", with_secret, key=keys["admin"])).status_code == 200
        is_problem(await web.ask("PUT", "/targets/secretive", plain, key=keys["editor"]), 403, "ROLE_TOO_LOW")
        queue_target = {"kind": "bullmq", "options": {"queue": "parcels", "connection": "shop"}}
        is_problem(await web.ask("PUT", "/targets/parcels", queue_target, key=keys["editor"]), 403, "ROLE_TOO_LOW")
        assert {"targets", "secrets"} <= set(SCOPES)


async def test_the_secret_key_is_rotated_online(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        await web.post("/secrets", {"name": "token", "value": "sesame"})
        await target(web, receiver, headers={"a": {"secret": "token"}})
        key = await web.key("admin")
        await delivered(web, service)

    def under(tx: Transaction) -> str:
        return str(tx.execute(sql("SELECT wrapped_by FROM timebell_data_keys")).scalar_one())

    async with make(open_here=False) as web, sink() as receiver:
        web.app.settings = replace(web.app.settings, webhook_allow_private=True, secret_key=f"newer,{SECRET}")
        ring = Keyring("newer")
        await web.app.open()
        assert await web.app.store.run(under) == Keyring(SECRET).newest_key_id
        async with web.app.running(heartbeat=0.1):

            async def rewrapped() -> bool:
                return bool(await web.app.store.run(under) == ring.newest_key_id)

            await wait_until(rewrapped)
        assert (await web.get("/targets", key=key)).status_code == 200  # which stores its digest under the newer one
    async with make(open_here=False) as web, sink() as receiver:
        web.app.settings = replace(web.app.settings, webhook_allow_private=True, secret_key="newer")
        async with web.app.running(heartbeat=0.1) as service:
            url = f"http://127.0.0.1:{receiver.port}/status/200"
            put = _http(url, headers={"a": {"secret": "token"}})
            assert (await web.ask("PUT", "/targets/orders", put, key=key)).status_code == 200
            made = await web.app.schedule_at("t.t", target="orders", timezone="UTC")
            await service.wait_until_idle()
            assert (await web.app.get(made.id)).state == "completed"
            assert receiver.requests[-1].headers["a"] == "sesame"
        web.app.settings = replace(web.app.settings, secret_key="stranger")
        with pytest.raises(Exception, match="encrypted with a secret key that this node does not have"):
            await web.app.targets.test("orders")
        web.app.settings = replace(web.app.settings, secret_key=None)
        with pytest.raises(Exception, match="no secret key"):
            await web.app.secrets.put("x", "y")


@on_sqlite_only
async def test_a_node_without_the_secret_key_holds_jobs_of_named_targets(make: Make) -> None:
    async with make() as web:
        assert (await web.ask("PUT", "/targets/orders", _http("https://example.com"))).status_code == 200
    async with make() as web:
        web.app.settings = replace(web.app.settings, secret_key=None)
        async with web.app.running(heartbeat=0.1):
            made = await web.app.schedule_at("t.t", target="orders", timezone="UTC")

            async def held() -> bool:
                return (await web.app.get(made.id)).hold == "unhandled"

            await wait_until(held)


@on_sqlite_only
async def test_a_secret_is_written_but_never_read(make: Make) -> None:
    async with make() as web:
        value = "the value of this secret, which is long"
        made = await web.post("/secrets", {"name": "token", "value": value}, idempotency_key="k")
        assert made.status_code == 201, made.text
        assert set(made.json()) == {"name", "tenantId", "version", "createdAt", "createdBy", "updatedAt"}
        replaced = await web.ask("PUT", "/secrets/token", {"value": value + "!"})
        assert replaced.json()["version"] == 2
        is_problem(await web.post("/secrets", {"name": "token", "value": "x"}), 409, "SECRET_EXISTS")
        is_problem(await web.ask("PUT", "/secrets/other", {"value": "x"}), 404, "SECRET_NOT_FOUND")
        for path in ("/secrets", "/secrets/token"):
            assert value[:5] not in (await web.get(path)).text
        too_long = is_problem(await web.post("/secrets", {"name": "n", "value": "x" * 40_000}), 422, "INVALID_FIELDS")
        assert "xxx" not in json.dumps(too_long)
        is_problem(await web.post("/secrets", {"name": "n", "value": "ä" * 30_000}), 422, "INVALID_SECRET")
        is_problem(await web.post("/secrets", {"name": "n", "value": ""}), 422, "INVALID_FIELDS")


async def test_secrets_appear_in_no_table_log_or_response(
    make: Make, store_url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty secrets are used in every possible way; none of them is stored in clear, logged or returned."""
    canaries = {f"canary-{n}": sha256(f"canary {n}".encode()).hexdigest()[:32] for n in range(20)}
    texts: list[str] = []
    caplog.set_level(logging.DEBUG)
    async with delivering(make) as (web, receiver, service):
        for name, value in canaries.items():
            texts.append((await web.post("/secrets", {"name": name, "value": value}, idempotency_key=name)).text)
        headers = {f"x-{name}": {"secret": name} for name in list(canaries)[:19]}
        own = f"whsec_{base64.b64encode(canaries['canary-19'].encode()).decode()}"
        body = {"name": "orders", **_http(f"http://127.0.0.1:{receiver.port}/echo", headers=headers)}
        created = await web.post("/targets", {**body, "signingSecret": own})
        texts.append(created.text.replace(own, ""))  # the response returns it once
        job = await delivered(web, service)
        assert job["status"] == "completed"
        assert receiver.requests[-1].headers["x-canary-7"] == canaries["canary-7"]
        texts += [json.dumps(job), (await web.post("/targets/orders/test")).text]
        for path in ("status/500", "status/410", "cut", "garbage"):
            await target(web, receiver, path, headers=headers)
            await web.post("/targets/orders/enable")
            texts.append(json.dumps(await delivered(web, service)))
        broken = web.app._named_targets_by_kind["http"]

        async def breaks(_: Any, options: dict[str, Any]) -> Any:
            raise RuntimeError(f"cannot reach {options['headers']}")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broken, "deliver", breaks)
            await web.post("/targets/orders/enable")
            texts.append(json.dumps(await delivered(web, service)))
            assert "TARGET_ERROR" in texts[-1]
        for path in ("/targets", "/secrets", "/targets/orders", "/audit-log?limit=500", "/jobs", "/dead-letters"):
            texts.append((await web.get(path)).text)
        too_long = {"name": "n", "value": canaries["canary-0"] * 2000}
        texts.append((await web.post("/secrets", too_long)).text)
        mistyped = [{"name": "n", "value": {"oh": canaries["canary-0"]}}, {"name": "n", "vlue": canaries["canary-0"]}]
        texts += [(await web.post("/secrets", one)).text for one in mistyped]
        found = await web.app.store.run(
            targets.resolve_targets, Keyring(SECRET), [("default", "orders")], web.app.clock.now()
        )
        texts.append(repr(found))
        texts.append(repr(web.app.settings))
        texts.append(await _dump(web, store_url))
    captured = capsys.readouterr()
    texts += [caplog.text, captured.out, captured.err]
    assert len(texts) > 25
    for place, text in enumerate(texts):
        for name, value in canaries.items():
            assert value not in text, f"{name} is in {place}: {text[max(0, text.index(value) - 200) :][:400]}"
            assert base64.b64encode(value.encode()).decode() not in text, (name, place)


async def _dump(web: Web, store_url: str) -> str:
    """Return every value of every table, and for SQLite the content of the file and its write-ahead log."""

    def every(tx: Transaction) -> str:
        from timebell.features import FEATURES
        from timebell.store.metadata import load_tables

        return "\n".join(str(tx.execute(sql(f"SELECT * FROM {table}")).all()) for table in load_tables(FEATURES).tables)

    found = await web.app.store.run(every)
    assert "canary-7" in found
    if store_url.startswith("sqlite"):
        path = store_url.removeprefix("sqlite:///")
        with sqlite3.connect(path) as connection:
            found += "\n".join(connection.iterdump())
        for suffix in ("", "-wal"):
            with open(path + suffix, "rb") as raw:
                found += raw.read().decode("latin-1")
    return found


@on_sqlite_only
async def test_the_webhook_id_is_the_occurrence_key_and_the_request_is_signed(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        secret = (await target(web, receiver, "status/500"))["signingSecret"]
        job = await delivered(
            web,
            service,
        )
        (request, *_) = receiver.requests
        assert request.headers["webhook-id"] == job["occurrenceKey"]
        at = int(request.headers["webhook-timestamp"])
        assert abs(at - datetime.now(UTC).timestamp()) < 60
        key = base64.b64decode(secret.removeprefix("whsec_"))
        assert len(key) >= 24
        content = f"{job['occurrenceKey']}.{at}.".encode() + request.body
        signed = base64.b64encode(hmac.new(key, content, sha256).digest()).decode()
        assert request.headers["webhook-signature"] == f"v1,{signed}"


@on_sqlite_only
async def test_a_retry_has_the_same_webhook_id_and_a_new_timestamp(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        await target(web, receiver, "status/500")
        retry = {"attempts": 2, "backoff": {"type": "fixed", "delay": 1.1, "jitter": 0}}
        await web.post("/jobs", {"topic": "t.t", "timezone": "UTC", "target": "orders", "retry": retry})
        await wait_until(lambda: len(receiver.requests) == 2)
        first, second = (one.headers for one in receiver.requests)
        assert first["webhook-id"] == second["webhook-id"]
        assert int(first["webhook-timestamp"]) < int(second["webhook-timestamp"])
        assert first["webhook-signature"] != second["webhook-signature"]


@on_sqlite_only
async def test_both_secrets_sign_during_a_rotation(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        old = (await target(web, receiver))["signingSecret"]
        answer = await rotated(web, overlapSeconds=10)  # enough for the next two requests
        new = answer["signingSecret"]
        assert answer["revision"] == 2
        assert [one["until"] is None for one in answer["signing"]] == [True, False]

        async def signed_by() -> set[str]:
            await web.post("/targets/orders/test")
            request = receiver.requests[-1]
            return {name for name, secret in (("old", old), ("new", new)) if _verifies(secret, request)}

        assert await signed_by() == {"old", "new"}
        await delivered(web, service)
        assert len(receiver.requests[-1].headers["webhook-signature"].split(" ")) == 2

        async def over() -> bool:
            return await signed_by() == {"new"}

        await wait_until(over)
        day = await rotated(web)
        ends = datetime.fromisoformat(day["signing"][1]["until"])
        assert timedelta(hours=23, minutes=59) < ends - datetime.now(UTC) <= timedelta(hours=24)
        immediate = await rotated(web, overlapSeconds=0, signingSecret=OLDER)
        assert (immediate["signing"], immediate["signingSecret"]) == ([{"until": None}], OLDER)
        for _ in range(4):
            await rotated(web)
        is_problem(await web.post("/targets/orders/rotate-secret", {}), 409, "TOO_MANY_SIGNING_SECRETS")


def _verifies(secret: str, request: Any) -> bool:
    try:
        Webhook(secret).verify(request.body, request.headers)
    except WebhookVerificationError:
        return False
    return True


def test_the_signature_check_that_receivers_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts any listed signature, allows five minutes of clock difference, and compares in constant time."""
    hook, body, now = Webhook(OLDER), b'{"a": 1}', datetime.now(UTC)

    def headers(at: datetime, *signatures: str) -> dict[str, str]:
        signed = " ".join(signatures or (hook.sign("m", at, body.decode()),))
        return {"webhook-id": "m", "webhook-timestamp": str(int(at.timestamp())), "webhook-signature": signed}

    right = hook.sign("m", now, body.decode())
    assert hook.verify(body, headers(now, "v1,AAAA", "v0,x", right)) == {"a": 1}
    for off in (timedelta(minutes=-4, seconds=-50), timedelta(minutes=4, seconds=50)):
        hook.verify(body, headers(now + off))
    for off in (timedelta(minutes=-5, seconds=-10), timedelta(minutes=5, seconds=10)):
        with pytest.raises(WebhookVerificationError):
            hook.verify(body, headers(now + off))
    compared: list[Any] = []
    constant = hmac.compare_digest

    def seen(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return constant(one, other)

    monkeypatch.setattr(standardwebhooks.webhooks.hmac, "compare_digest", seen)
    hook.verify(body, headers(now, right))
    assert compared
    with pytest.raises(WebhookVerificationError):
        hook.verify(body, headers(now, "v1,AAAA"))


def test_signatures_match_the_vector_of_the_specification() -> None:
    at = datetime.fromtimestamp(1614265330, UTC)
    signed = Webhook("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").sign(
        "msg_p5jXN8AQM9LWM0D4loKWxJek", at, '{"test": 2432232314}'
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@on_sqlite_only
async def test_signed_requests_go_only_to_the_registered_host(make: Make) -> None:
    async with delivering(make) as (web, receiver, service), sink() as other:
        await target(web, receiver, "status/302")
        job = await delivered(web, service)
        assert (job["errorCode"], len(receiver.requests), len(other.requests)) == ("HTTP_STATUS", 1, 0)
        # Headers cannot redirect a signed request either.
        for name in ("host", "webhook-signature", "x-forwarded-host\r\nhost"):
            moved = _http(f"http://127.0.0.1:{receiver.port}/status/200", headers={name: "evil.example"})
            is_problem(await web.ask("PUT", "/targets/orders", moved), 422, "INVALID_HEADER")


async def test_targets_and_secrets_are_managed_from_python(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        app = web.app
        await app.secrets.put("token", "sesame")
        url = f"http://127.0.0.1:{receiver.port}/status/200"
        made = await app.targets.put("orders", "http", {"url": url, "headers": {"a": {"secret": "token"}}})
        assert made.signing_secret is not None
        assert "whsec" not in repr(made)
        assert (await app.targets.get("orders")).signing_secret is None
        job = await app.schedule_at("t.t", target="orders", timezone="UTC")
        await service.wait_until_idle()
        assert (await app.get(job.id)).state == "completed"
        assert (await app.targets.test("orders")).delivered
        assert [one.name for one in await app.targets.list()] == ["orders"]
        assert [one.name for one in await app.secrets.list()] == ["token"]
        for name, verb in (("unknown", app.targets.get), ("unknown", app.targets.delete), ("unknown", app.secrets.get)):
            with pytest.raises(NotFound):
                await verb(name)
        await app.targets.delete("orders")
        await app.secrets.delete("token")


async def test_concurrent_jobs_resolve_their_target_in_batches(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        await target(web, receiver)
        resolutions = 0
        real = targets.resolve_targets

        def counted(tx: Transaction, ring: Any, keys: Any, now: Any) -> Any:
            nonlocal resolutions
            resolutions += 1
            return real(tx, ring, keys, now)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(targets, "resolve_targets", counted)
            await web.post("/queues/default/pause", {})
            await web.app.schedule_many([JobSpec(topic="t.t", target="orders", timezone="UTC") for _ in range(40)])
            await web.post("/queues/default/resume")
            await service.wait_until_idle()
        assert len(receiver.requests) == 40
        assert resolutions < 20


async def test_a_named_target_can_report_back(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        await target(web, receiver, "status/202", reportsBack=True)
        made = (await web.post("/jobs", {"topic": "t.t", "timezone": "UTC", "target": "orders"})).json()

        async def out() -> bool:
            return bool((await web.get(f"/jobs/{made['id']}")).json()["status"] == "dispatched")

        await wait_until(out)
        token = receiver.requests[-1].headers["timebell-token"]
        web.app.settings = replace(web.app.settings, secret_key=f"newer,{SECRET}")  # rotated in the meantime
        done = await web.post(f"/jobs/{made['id']}/complete", {"token": token})
        assert done.json()["status"] == "completed"
        assert done.json()["attempts"][0]["target"]["name"] == "orders"


def test_an_inline_http_target_needs_no_secret_key() -> None:
    options = {"url": "https://example.com", "signingSecrets": [OLDER]}
    assert HttpTarget(None, now=lambda: datetime.now(UTC)).check(options)["signingSecrets"] == [OLDER]
