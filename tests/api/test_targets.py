"""Targets under a name, and the secrets they need: over HTTP, with an engine and a receiver, on both stores."""

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

from .test_reports import until
from .web import NIGHTLY, SECRET, Web, is_problem

Make = Callable[..., Any]
LATER = "2040-01-01T00:00:00Z"
one_store = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
"""Of what the store has no part in."""


@asynccontextmanager
async def delivering(make: Make, **options: Any) -> AsyncIterator[tuple[Web, Sink, Service]]:
    """An engine that delivers to targets by name, to a receiver on this machine."""
    async with make(timezone="UTC", **options) as web, sink() as receiver:
        web.app.settings = replace(web.app.settings, webhook_allow_private=True)
        async with web.app.running(heartbeat=0.1) as service:
            yield web, receiver, service


async def target(web: Web, receiver: Sink, path: str = "status/200", name: str = "orders", **options: Any) -> Any:
    """Put a target; the answer."""
    url = f"http://127.0.0.1:{receiver.port}/{path}"
    put = await web.ask("PUT", f"/targets/{name}", {"kind": "http", "options": {"url": url, **options}})
    assert put.status_code == 200, put.text
    return put.json()


async def delivered(web: Web, service: Service, given: Any = "orders", **fields: Any) -> Any:
    """A job for the target, once it has ended."""
    made = await web.post("/jobs", {"topic": "t.t", "timezone": "UTC", "maxRetries": 0, "target": given, **fields})
    assert made.status_code == 201, made.text
    await service.idle()
    return (await web.get(f"/jobs/{made.json()['id']}")).json()


async def test_a_job_goes_where_its_target_says_when_it_is_delivered(make: Make) -> None:
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
        assert (await target(web, receiver, "status/200?second"))["revision"] == 2  # the same again is no edit
        await web.post("/queues/default/resume")
        await service.idle()
        assert [one.line.split("?")[1] for one in receiver.requests] == ["second HTTP/1.1"] * 2
        job = (await web.get(f"/jobs/{jobs[0]['id']}")).json()
        assert (job["status"], job["result"]["status"], job["target"]) == ("completed", 200, {"name": "orders"})
        (attempt,) = job["attempts"]
        assert attempt["target"] == {"name": "orders", "kind": "http", "revision": 2}
        assert (attempt["attempt"], attempt["code"], attempt["error"]) == (1, None, None)


async def test_schedules_name_targets_too_and_keep_them_through_edits(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        await target(web, receiver)
        made = (await web.post("/schedules", {**NIGHTLY, "target": "orders"})).json()
        assert made["target"] == {"name": "orders"}
        ran = await web.post(f"/schedules/{made['id']}/trigger")
        await service.idle()
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


async def test_an_unknown_name_is_refused_when_it_is_said(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        await target(web, receiver)
        for given in ("order", {"name": "order"}):
            is_problem(await web.post("/jobs", {"topic": "t.t", "target": given}), 404, "TARGET_NOT_FOUND")
        is_problem(await web.post("/schedules", {**NIGHTLY, "target": "order"}), 404, "TARGET_NOT_FOUND")
        mixed = {"name": "orders", "url": "https://example.com"}
        is_problem(await web.post("/jobs", {"topic": "t.t", "target": mixed}), 422, "TARGET_OPTIONS_INVALID")
        lines = [{"topic": "t.t", "runAt": LATER, "target": name} for name in ("orders", "order", "orders")]
        body = "\n".join(map(json.dumps, ({**line, "key": f"k{at}"} for at, line in enumerate(lines)))).encode()
        done = (await web.post("/jobs/bulk", body, content_type="application/x-ndjson")).json()
        assert (done["progress"]["done"], done["progress"]["failed"]) == (2, 1)
        assert [(one["line"], one["code"]) for one in done["errors"]] == [(2, "TARGET_NOT_FOUND")]
        with pytest.raises(NotFound):
            await web.app.schedule_many([JobSpec(topic="t.t", target=name) for name in ("orders", "order")])
        with pytest.raises(NotFound):  # a name is its tenant's
            await web.app.schedule_at("t.t", target="orders", tenant_id="another")
        waiting = (await web.get("/jobs?status=pending")).json()["items"]
        assert len(waiting) == 2


async def test_what_is_used_is_not_deleted_and_says_by_how_many(make: Make) -> None:
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


async def test_a_receiver_that_is_gone_disables_its_target_until_somebody_enables_it(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        await target(web, receiver, "status/410")
        first = await delivered(web, service, maxRetries=3)
        assert (first["status"], first["errorCode"], first["attemptsMade"]) == ("failed", "HTTP_STATUS", 1)
        shown = (await web.get("/targets/orders")).json()
        assert shown["disabledAt"] is not None
        assert "410" in shown["disabledReason"]
        seen = await web.app.store.run(gauges.read, web.app.clock.now(), 10.0)
        assert seen.disabled == 1
        (told,) = (await web.get("/audit-log?action=target.disable")).json()["items"]
        assert (told["actor"], told["subject"]) == ("timebell", "orders")
        place = (web.app.clock.now() - timedelta(hours=1), "00000000-0000-0000-0000-000000000000")
        happened = await web.app.store.run(events.since, events.Wanted("default", types=["target.*"]), place, 50)
        assert ("target.disable", "orders") in [(one.type, one.subject) for one in happened]
        second = await delivered(web, service, maxRetries=3)
        assert (second["status"], second["errorCode"], second["attemptsMade"]) == ("failed", "TARGET_DISABLED", 1)
        assert len(receiver.requests) == 1  # nothing more was sent there
        await target(web, receiver, "status/200")  # an edit alone enables nothing
        assert (await delivered(web, service))["errorCode"] == "TARGET_DISABLED"
        tried = (await web.post("/targets/orders/test")).json()
        assert tried["delivered"]  # one can see whether it works again first
        assert (await web.post("/targets/orders/enable")).json()["disabledAt"] is None
        await web.post("/dead-letters/replay", {"filter": {"errorCode": "TARGET_DISABLED"}})

        async def replayed() -> bool:
            return bool((await web.get(f"/jobs/{second['id']}")).json()["status"] == "completed")

        await until(replayed)
        assert (await web.app.store.run(gauges.read, web.app.clock.now(), 10.0)).disabled == 0


async def test_an_answer_to_what_was_before_an_edit_disables_nothing(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        await target(web, receiver, "status/410")
        await target(web, receiver, "status/200")
        now = web.app.clock.now()
        assert not await web.app.store.run(targets.disable, "default", "orders", 1, "old news", now)
        assert (await web.get("/targets/orders")).json()["disabledAt"] is None


async def test_options_take_secrets_which_nobody_is_shown(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        await web.post("/secrets", {"name": "token", "value": "sesame-open"})
        headers = {"authorization": {"secret": "token"}, "x-team": "billing"}
        made = await target(web, receiver, "echo", headers=headers)
        assert made["options"]["headers"] == headers
        job = await delivered(web, service)
        assert receiver.requests[-1].headers["authorization"] == "sesame-open"
        assert job["status"] == "completed"
        assert "sesame" not in json.dumps(job)  # though the receiver said it
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
        said = is_problem(await web.ask("PUT", "/targets/other", unfit), 422, "HEADER_INVALID")
        assert "break" not in json.dumps(said)
        for at, url in enumerate(("ftp://example.com/sesame", "https://sesame.example:25/")):
            await web.post("/secrets", {"name": f"url-{at}", "value": url})
            hidden = {"kind": "http", "options": {"url": {"secret": f"url-{at}"}}}
            refused = await web.ask("PUT", "/targets/other", hidden)
            assert refused.status_code in (403, 422)
            assert "sesame" not in refused.text


@one_store
async def test_a_check_that_says_what_it_was_given_says_no_secret(make: Make) -> None:
    class Telltale(HttpTarget):
        def check(self, options: dict[str, Any]) -> dict[str, Any]:
            raise InvalidInput(f"{options} does not do.", code="URL_INVALID", fix=f"Not {options['url']}.")

    async with make() as web:
        web.app.kinds["http"] = Telltale(None, now=web.app.clock.now)
        await web.post("/secrets", {"name": "token", "value": "sesame"})
        hidden = {"kind": "http", "options": {"url": {"secret": "token"}}}
        refused = is_problem(await web.ask("PUT", "/targets/orders", hidden), 422, "URL_INVALID")
        assert "sesame" not in json.dumps(refused)
        assert "***" in refused["detail"]


@one_store
async def test_a_test_says_what_went_out_and_what_came_back(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        secret = (await target(web, receiver, "status/200"))["signingSecret"]
        tried = (await web.post("/targets/orders/test")).json()
        assert tried["delivered"]
        assert tried["response"] == {"status": 200, "body": '{"said":"hi"}'}
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
        is_problem(await web.post("/targets/nobody/test"), 404, "TARGET_NOT_FOUND")


@one_store
async def test_a_new_signing_secret_is_shown_once(make: Make) -> None:
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
        kept = await web.ask("PUT", "/targets/own", {**_http("https://example.com"), "signingSecret": OLDER})
        is_problem(kept, 422, "SIGNING_SECRET_KEPT")
        weak = {"name": "weak", **_http("https://example.com"), "signingSecret": "whsec_QUJD"}
        said = is_problem(await web.post("/targets", weak), 422, "SIGNING_SECRET_INVALID")
        assert "QUJD" not in json.dumps(said)
        for name in ("a/b", "", " a", "a" * 101, "ä"):
            refused = await web.post("/targets", {"name": name, **_http("https://example.com")})
            assert (refused.status_code, refused.json()["code"] in ("INVALID_NAME", "FIELDS_INVALID")) == (422, True)
        private = await web.post("/targets", {"name": "in", **_http("https://10.0.0.1/")})
        is_problem(private, 403, "PRIVATE_ADDRESS")
        smuggled = _http("https://example.com", signingSecrets=[OLDER])
        is_problem(await web.ask("PUT", "/targets/x", smuggled), 422, "TARGET_OPTIONS_INVALID")
        inline = {"topic": "t.t", "timezone": "UTC", "target": {**smuggled["options"], "kind": "http"}}
        is_problem(await web.post("/jobs", inline), 422, "TARGET_OPTIONS_INVALID")


@one_store
async def test_who_may_do_what(make: Make) -> None:
    async with make(open_here=False) as web:
        keys = {role: await web.key(role) for role in ("viewer", "operator", "editor", "admin")}
        await web.post("/secrets", {"name": "token", "value": "sesame"}, key=keys["admin"])
        for role in ("viewer", "operator"):
            is_problem(await web.get("/secrets", key=keys[role]), 403, "ROLE_TOO_LOW")
        is_problem(await web.post("/secrets", {"name": "x", "value": "y"}, key=keys["editor"]), 403, "ROLE_TOO_LOW")
        plain, taking = _http("https://example.com"), _http("https://example.com", headers={"a": {"secret": "token"}})
        assert (await web.ask("PUT", "/targets/plain", plain, key=keys["editor"])).status_code == 200
        # Whoever says where a secret goes can read it there.
        is_problem(await web.ask("PUT", "/targets/plain", taking, key=keys["editor"]), 403, "ROLE_TOO_LOW")
        assert (await web.ask("PUT", "/targets/taking", taking, key=keys["admin"])).status_code == 200
        is_problem(await web.ask("PUT", "/targets/taking", plain, key=keys["editor"]), 403, "ROLE_TOO_LOW")
        there = {"kind": "bullmq", "options": {"queue": "parcels", "connection": "shop"}}
        is_problem(await web.ask("PUT", "/targets/parcels", there, key=keys["editor"]), 403, "ROLE_TOO_LOW")
        assert {"targets", "secrets"} <= set(SCOPES)


async def test_s44_the_secret_key_is_rotated_online(make: Make) -> None:
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
        assert await web.app.store.run(under) == Keyring(SECRET).newest
        async with web.app.running(heartbeat=0.1):

            async def rewrapped() -> bool:
                return bool(await web.app.store.run(under) == ring.newest)

            await until(rewrapped)
        assert (await web.get("/targets", key=key)).status_code == 200  # and the key is kept under the newer one now
    async with make(open_here=False) as web, sink() as receiver:
        web.app.settings = replace(web.app.settings, webhook_allow_private=True, secret_key="newer")
        async with web.app.running(heartbeat=0.1) as service:
            url = f"http://127.0.0.1:{receiver.port}/status/200"
            put = _http(url, headers={"a": {"secret": "token"}})
            assert (await web.ask("PUT", "/targets/orders", put, key=key)).status_code == 200
            made = await web.app.schedule_at("t.t", target="orders", timezone="UTC")
            await service.idle()
            assert (await web.app.get(made.id)).state == "completed"
            assert receiver.requests[-1].headers["a"] == "sesame"
        web.app.settings = replace(web.app.settings, secret_key="stranger")
        with pytest.raises(Exception, match="under a secret key that this node has not"):
            await web.app.targets.test("orders")
        web.app.settings = replace(web.app.settings, secret_key=None)
        with pytest.raises(Exception, match="no secret key"):
            await web.app.secrets.put("x", "y")


@one_store
async def test_s44_without_its_secret_key_a_node_leaves_such_jobs_to_others(make: Make) -> None:
    async with make() as web:
        assert (await web.ask("PUT", "/targets/orders", _http("https://example.com"))).status_code == 200
    async with make() as web:
        web.app.settings = replace(web.app.settings, secret_key=None)
        async with web.app.running(heartbeat=0.1):
            made = await web.app.schedule_at("t.t", target="orders", timezone="UTC")

            async def held() -> bool:
                return (await web.app.get(made.id)).hold == "unheard"

            await until(held)


@one_store
async def test_s45_a_secret_is_written_and_never_read(make: Make) -> None:
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
        too_long = is_problem(await web.post("/secrets", {"name": "n", "value": "x" * 40_000}), 422, "FIELDS_INVALID")
        assert "xxx" not in json.dumps(too_long)
        is_problem(await web.post("/secrets", {"name": "n", "value": "ä" * 30_000}), 422, "INVALID_SECRET")
        is_problem(await web.post("/secrets", {"name": "n", "value": ""}), 422, "FIELDS_INVALID")


async def test_s46_twenty_canaries_are_nowhere(
    make: Make, store_url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty secrets, used in every way there is; not one of them in what is stored, logged, answered or shown."""
    canaries = {f"canary-{n}": sha256(f"canary {n}".encode()).hexdigest()[:32] for n in range(20)}
    said: list[str] = []
    caplog.set_level(logging.DEBUG)
    async with delivering(make) as (web, receiver, service):
        for name, value in canaries.items():
            said.append((await web.post("/secrets", {"name": name, "value": value}, idempotency_key=name)).text)
        headers = {f"x-{name}": {"secret": name} for name in list(canaries)[:19]}
        own = f"whsec_{base64.b64encode(canaries['canary-19'].encode()).decode()}"
        body = {"name": "orders", **_http(f"http://127.0.0.1:{receiver.port}/echo", headers=headers)}
        said.append((await web.post("/targets", {**body, "signingSecret": own})).text.replace(own, ""))  # this once
        job = await delivered(web, service)
        assert job["status"] == "completed"
        assert receiver.requests[-1].headers["x-canary-7"] == canaries["canary-7"]
        said += [json.dumps(job), (await web.post("/targets/orders/test")).text]
        for path in ("status/500", "status/410", "cut", "garbage"):
            await target(web, receiver, path, headers=headers)
            await web.post("/targets/orders/enable")
            said.append(json.dumps(await delivered(web, service)))
        broken = web.app.by_name["http"]

        async def breaks(_: Any, options: dict[str, Any]) -> Any:
            raise RuntimeError(f"cannot reach {options['headers']}")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broken, "deliver", breaks)
            await web.post("/targets/orders/enable")
            said.append(json.dumps(await delivered(web, service)))
            assert "TARGET_BROKE" in said[-1]
        for path in ("/targets", "/secrets", "/targets/orders", "/audit-log?limit=500", "/jobs", "/dead-letters"):
            said.append((await web.get(path)).text)
        too_long = {"name": "n", "value": canaries["canary-0"] * 2000}
        said.append((await web.post("/secrets", too_long)).text)
        mistyped = [{"name": "n", "value": {"oh": canaries["canary-0"]}}, {"name": "n", "vlue": canaries["canary-0"]}]
        said += [(await web.post("/secrets", one)).text for one in mistyped]
        found = await web.app.store.run(targets.resolve, Keyring(SECRET), [("default", "orders")], web.app.clock.now())
        said.append(repr(found))
        said.append(repr(web.app.settings))
        said.append(await _dump(web, store_url))
    captured = capsys.readouterr()
    said += [caplog.text, captured.out, captured.err]
    assert len(said) > 25
    for place, text in enumerate(said):
        for name, value in canaries.items():
            assert value not in text, f"{name} is in {place}: {text[max(0, text.index(value) - 200) :][:400]}"
            assert base64.b64encode(value.encode()).decode() not in text, (name, place)


async def _dump(web: Web, store_url: str) -> str:
    """Every value of every table, and of SQLite the file itself, with what it has not folded in yet."""

    def every(tx: Transaction) -> str:
        from timebell.store.schema import metadata

        return "\n".join(str(tx.execute(sql(f"SELECT * FROM {table}")).all()) for table in metadata.tables)

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


@one_store
async def test_s70_the_id_is_that_of_the_occurrence_and_the_signature_that_of_the_attempt(make: Make) -> None:
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


@one_store
async def test_s70_a_retry_has_the_same_id_and_a_time_of_its_own(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        await target(web, receiver, "status/500")
        retry = {"attempts": 2, "backoff": {"type": "fixed", "delay": 1.1, "jitter": 0}}
        await web.post("/jobs", {"topic": "t.t", "timezone": "UTC", "target": "orders", "retry": retry})
        await until(lambda: len(receiver.requests) == 2)
        first, second = (one.headers for one in receiver.requests)
        assert first["webhook-id"] == second["webhook-id"]
        assert int(first["webhook-timestamp"]) < int(second["webhook-timestamp"])
        assert first["webhook-signature"] != second["webhook-signature"]


@one_store
async def test_s71_both_secrets_sign_while_one_is_rotated(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        old = (await target(web, receiver))["signingSecret"]
        answer = await rotated(web, overlapSeconds=2)
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

        await until(over)
        day = await rotated(web)
        ends = datetime.fromisoformat(day["signing"][1]["until"])
        assert timedelta(hours=23, minutes=59) < ends - datetime.now(UTC) <= timedelta(hours=24)
        at_once = await rotated(web, overlapSeconds=0, signingSecret=OLDER)
        assert (at_once["signing"], at_once["signingSecret"]) == ([{"until": None}], OLDER)
        for _ in range(4):
            await rotated(web)
        is_problem(await web.post("/targets/orders/rotate-secret", {}), 409, "SIGNING_SECRETS_MANY")


def _verifies(secret: str, request: Any) -> bool:
    try:
        Webhook(secret).verify(request.body, request.headers)
    except WebhookVerificationError:
        return False
    return True


def test_s72_the_check_that_receivers_are_told_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """All signatures that are listed, within five minutes, in constant time."""
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


def test_s73_the_vectors_of_the_specification() -> None:
    at = datetime.fromtimestamp(1614265330, UTC)
    signed = Webhook("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").sign(
        "msg_p5jXN8AQM9LWM0D4loKWxJek", at, '{"test": 2432232314}'
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@one_store
async def test_s74_a_signature_goes_to_the_registered_host_alone(make: Make) -> None:
    async with delivering(make) as (web, receiver, service), sink() as other:
        await target(web, receiver, "status/302")
        job = await delivered(web, service)
        assert (job["errorCode"], len(receiver.requests), len(other.requests)) == ("HTTP_STATUS", 1, 0)
        # Nor does an answer, or a header, move it.
        for name in ("host", "webhook-signature", "x-forwarded-host\r\nhost"):
            moved = _http(f"http://127.0.0.1:{receiver.port}/status/200", headers={name: "evil.example"})
            is_problem(await web.ask("PUT", "/targets/orders", moved), 422, "HEADER_INVALID")


async def test_python_has_the_same_verbs(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        app = web.app
        await app.secrets.put("token", "sesame")
        url = f"http://127.0.0.1:{receiver.port}/status/200"
        made = await app.targets.put("orders", "http", {"url": url, "headers": {"a": {"secret": "token"}}})
        assert made.signing_secret is not None
        assert "whsec" not in repr(made)
        assert (await app.targets.get("orders")).signing_secret is None
        job = await app.schedule_at("t.t", target="orders", timezone="UTC")
        await service.idle()
        assert (await app.get(job.id)).state == "completed"
        assert (await app.targets.test("orders")).delivered
        assert [one.name for one in await app.targets.list()] == ["orders"]
        assert [one.name for one in await app.secrets.list()] == ["token"]
        for name, verb in (("nobody", app.targets.get), ("nobody", app.targets.delete), ("nobody", app.secrets.get)):
            with pytest.raises(NotFound):
                await verb(name)
        await app.targets.delete("orders")
        await app.secrets.delete("token")


async def test_many_jobs_at_once_look_their_target_up_together(make: Make) -> None:
    async with delivering(make) as (web, receiver, service):
        await target(web, receiver)
        looks = 0
        real = targets.resolve

        def counted(tx: Transaction, ring: Any, keys: Any, now: Any) -> Any:
            nonlocal looks
            looks += 1
            return real(tx, ring, keys, now)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(targets, "resolve", counted)
            await web.post("/queues/default/pause", {})
            await web.app.schedule_many([JobSpec(topic="t.t", target="orders", timezone="UTC") for _ in range(40)])
            await web.post("/queues/default/resume")
            await service.idle()
        assert len(receiver.requests) == 40
        assert looks < 20


async def test_a_target_by_name_that_reports_back(make: Make) -> None:
    async with delivering(make) as (web, receiver, _):
        await target(web, receiver, "status/202", reportsBack=True)
        made = (await web.post("/jobs", {"topic": "t.t", "timezone": "UTC", "target": "orders"})).json()

        async def out() -> bool:
            return bool((await web.get(f"/jobs/{made['id']}")).json()["status"] == "dispatched")

        await until(out)
        token = receiver.requests[-1].headers["timebell-token"]
        web.app.settings = replace(web.app.settings, secret_key=f"newer,{SECRET}")  # rotated meanwhile
        done = await web.post(f"/jobs/{made['id']}/complete", {"token": token})
        assert done.json()["status"] == "completed"
        assert done.json()["attempts"][0]["target"]["name"] == "orders"


def test_http_alone_needs_no_secret_of_the_installation() -> None:
    options = {"url": "https://example.com", "signingSecrets": [OLDER]}
    assert HttpTarget(None, now=lambda: datetime.now(UTC)).check(options)["signingSecrets"] == [OLDER]
