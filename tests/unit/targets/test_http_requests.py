"""The HTTP target: methods, query, bodies, accepted responses and redirects."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from email import message_from_bytes
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from tests.unit.targets.sink import NOW, SECRET, Post, Run, Sink, deliver_once, local, sink
from timebell import http_client
from timebell.errors import InvalidInput
from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery, Outcome
from timebell.targets.http import HttpTarget


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_every_method_is_sent(post: Post, method: str) -> None:
    outcome, server = post("/status/200", method=method)
    assert (outcome.delivered, outcome.result["status"]) == (True, 200)
    (request,) = server.requests
    assert request.line == f"{method} /status/200 HTTP/1.1"
    has_body = method in ("POST", "PUT", "PATCH")
    assert bool(request.body) is has_body
    assert ("content-length" in request.headers) is ("content-type" in request.headers) is has_body


def test_a_response_to_head_ends_with_its_headers(post: Post) -> None:
    outcome, _ = post("/big", local(timeout=5), method="HEAD")  # announces 10 MB
    assert (outcome.delivered, outcome.result) == (True, {"status": 200, "body": ""})


def test_query_parameters_are_filled_and_encoded(post: Post, delivery: Delivery) -> None:
    query = {"q": "a b&c=ü", "id": "{{payload.text}}", "n": 7, "tag": ["x", "y"], "none": "{{payload.nothing?}}"}
    _, server = post("/status/200?a=1", method="GET", query=query)
    path = server.requests[0].line.split(" ")[1]
    title = delivery.payload["text"]
    assert parse_qsl(urlsplit(path).query) == [
        ("a", "1"), ("q", "a b&c=ü"), ("id", title), ("n", "7"), ("tag", "x"), ("tag", "y"),
    ]  # fmt: skip
    assert "a%20b%26c%3D%C3%BC" in path


@pytest.mark.parametrize(
    ("options", "content_type", "body"),
    [
        ({"body": "none"}, None, b""),
        ({"body": "json"}, "application/json", b'{"title":"T","n":2,"tags":["x","y"]}'),
        ({"body": "text", "template": "a={{payload.title}}"}, "text/plain; charset=utf-8", b"a=T"),
        ({"body": "text", "template": "{{payload.n}}"}, "text/plain; charset=utf-8", b"2"),
        ({"body": "text", "template": "a,b", "contentType": "text/csv"}, "text/csv", b"a,b"),
        ({"body": "form"}, "application/x-www-form-urlencoded", b"title=T&n=2&tags=x&tags=y"),
        ({"body": "form", "template": {"a b": "{{payload.title}}", "ok": True}}, "application/x-www-form-urlencoded",
         b"a+b=T&ok=true"),
        ({"template": {"t": "{{payload.title}}"}}, "application/json", b'{"t":"T"}'),
    ],
)  # fmt: skip
def test_bodies_are_rendered(
    run: Run, delivery: Delivery, options: dict[str, Any], content_type: str | None, body: bytes
) -> None:
    request = run(_request_of(replace(delivery, payload={"title": "T", "n": 2, "tags": ["x", "y"]}), options))
    assert (request.headers.get("content-type"), request.body) == (content_type, body)


async def _request_of(delivery: Delivery, options: dict[str, Any]) -> Any:
    async with sink() as server:
        outcome = await deliver_once(
            local(), delivery, {"url": f"http://a.example:{server.port}/status/200", **options}
        )
        assert outcome.delivered, outcome
        return server.requests[0]


def test_multipart_forms_are_parsed_by_the_email_package(run: Run, delivery: Delivery) -> None:
    template = {"title": "{{payload.title}}", 'odd "name"': "two\r\nlines"}
    request = run(_request_of(replace(delivery, payload={"title": "ü"}), {"body": "multipart", "template": template}))
    head = f"content-type: {request.headers['content-type']}\r\n\r\n".encode()
    parts: list[Any] = list(message_from_bytes(head + request.body).walk())[1:]
    assert [part.get_payload(decode=True).decode() for part in parts] == ["ü", "two\r\nlines"]
    assert [part.get_param("name", header="content-disposition") for part in parts] == ["title", "odd %22name%22"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"method": "get"}, "INVALID_TARGET_OPTIONS"),
        ({"method": "TRACE"}, "INVALID_TARGET_OPTIONS"),
        ({"query": ["a"]}, "INVALID_TARGET_OPTIONS"),
        ({"query": {"a": "{{nothing}}"}}, "INVALID_TEMPLATE"),
        ({"query": {"a": "{{payload.x"}}, "INVALID_TEMPLATE"),
        ({"body": "text", "template": {"a": "b"}}, "INVALID_TEMPLATE"),
        ({"body": "form", "template": "a=b"}, "INVALID_TEMPLATE"),
        ({"body": "json", "template": {}}, "INVALID_TARGET_OPTIONS"),
        ({"body": "none", "contentType": "text/csv"}, "INVALID_TARGET_OPTIONS"),
        ({"contentType": "text/csv\r\nx: y"}, "INVALID_TARGET_OPTIONS"),
        ({"timeout": "31m"}, "INVALID_TIMEOUT"),
        ({"timeout": 0}, "INVALID_TIMEOUT"),
        ({"timeout": "soon"}, "INVALID_DURATION"),
        ({"success": []}, "INVALID_TARGET_OPTIONS"),
        ({"success": [100]}, "INVALID_TARGET_OPTIONS"),
        ({"success": ["1xx"]}, "INVALID_TARGET_OPTIONS"),
        ({"success": 200}, "INVALID_TARGET_OPTIONS"),
        ({"success": [True]}, "INVALID_TARGET_OPTIONS"),
        ({"expect": {}}, "INVALID_TARGET_OPTIONS"),
        ({"expect": {"matches": ".*"}}, "INVALID_TARGET_OPTIONS"),
        ({"expect": {"contains": ""}}, "INVALID_TARGET_OPTIONS"),
        ({"expect": {"json": {"a": {}}}}, "INVALID_TARGET_OPTIONS"),
        ({"followRedirects": "yes"}, "INVALID_TARGET_OPTIONS"),
        ({"signed": 0}, "INVALID_TARGET_OPTIONS"),
        ({"concurrency": 0}, "INVALID_CONCURRENCY"),
        ({"rate": True}, "INVALID_RATE"),
        ({"auth": {"type": "digest"}}, "INVALID_TARGET_OPTIONS"),
        ({"auth": {"type": "bearer"}}, "INVALID_TARGET_OPTIONS"),
        ({"auth": {"type": "bearer", "token": "a b"}}, "INVALID_TARGET_OPTIONS"),
        ({"auth": {"type": "bearer", "token": "a"}, "headers": {"Authorization": "b"}}, "INVALID_TARGET_OPTIONS"),
        ({"auth": {"type": "basic", "username": "a:b", "password": "c"}}, "INVALID_TARGET_OPTIONS"),
        ({"auth": {"type": "basic", "username": "", "password": ""}}, "INVALID_TARGET_OPTIONS"),
        ({"auth": {"type": "basic", "username": "a"}}, "INVALID_TARGET_OPTIONS"),
        ({"auth": {"type": "oidc", "audience": "a", "credentials": "{}"}}, "INVALID_CREDENTIALS"),
        ({"tls": {}}, "INVALID_TARGET_OPTIONS"),
        ({"tls": {"key": "a"}}, "INVALID_TARGET_OPTIONS"),
        ({"tls": {"ca": "no certificate"}}, "INVALID_CERTIFICATE"),
        ({"tls": {"certificate": "a", "key": "b"}}, "INVALID_CERTIFICATE"),
        ({"proxy": "http://proxy.example:3128"}, "INVALID_TARGET_OPTIONS"),
        ({"proxy": {"url": "https://proxy.example:3128"}}, "INVALID_URL"),
        ({"proxy": {"url": "http://proxy.example:3128/path"}}, "INVALID_URL"),
        ({"proxy": {"url": "http://proxy.example:3128", "username": "a"}}, "INVALID_TARGET_OPTIONS"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        HttpTarget(SECRET, now=lambda: NOW).check({"url": "https://example.com/", **options})
    assert caught.value.code == code


def test_the_normal_form_of_options_is_stable() -> None:
    target = HttpTarget(SECRET, now=lambda: NOW)
    options = {
        "url": "https://example.com", "method": "PUT", "query": {"a": "b"}, "body": "text", "template": "x",
        "contentType": "text/csv", "timeout": "30m", "success": [200, "3xx"], "expect": {"contains": "OK"},
        "followRedirects": True, "signed": False, "concurrency": 2, "rate": 5, "perSeconds": 60,
        "auth": {"type": "bearer", "token": "t"}, "proxy": {"url": "http://proxy.example:3128"},
    }  # fmt: skip
    checked = target.check(options)
    assert checked["timeout"] == 1800.0
    assert target.check(checked) == checked


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"body": "text", "template": "{{payload.nothing}}"}, "INVALID_BODY"),
        ({"body": "form", "template": {"a": "{{metadata}}"}}, "INVALID_BODY"),
        ({"method": "GET", "query": {"a": "{{payload.nothing}}"}}, "INVALID_BODY"),
        ({"method": "GET", "query": {"a": "x" * 9000}}, "INVALID_BODY"),
    ],
)
def test_a_request_that_cannot_be_built_is_not_sent(post: Post, options: dict[str, Any], code: str) -> None:
    outcome, server = post("/status/200", **options)
    assert (outcome.code, outcome.retryable, server.requests) == (code, False, [])


def test_an_unsigned_request_has_only_the_headers_of_any_client(post: Post) -> None:
    _, server = post("/status/200", method="GET", signed=False, headers={"X-Own": "1"})
    assert set(server.requests[0].headers) == {"host", "user-agent", "x-own", "accept-encoding", "connection"}


@pytest.mark.parametrize(
    ("path", "options", "code"),
    [
        ("/status/404", {"success": [200, 404]}, None),
        ("/status/302", {"success": ["2xx", "3xx"]}, None),
        ("/status/410", {"success": [410]}, None),
        ("/status/200", {"success": [204]}, "HTTP_STATUS"),
        ("/status/200", {"expect": {"contains": '"said"'}}, None),
        ("/status/200", {"expect": {"contains": "goodbye"}}, "RESPONSE_REJECTED"),
        ("/status/200", {"expect": {"json": {"said": "hi"}}}, None),
        ("/status/200", {"expect": {"json": {"said": "ho"}}}, "RESPONSE_REJECTED"),
        ("/status/200", {"expect": {"json": {"said.more": "hi"}}}, "RESPONSE_REJECTED"),
        ("/nul", {"expect": {"json": {"said": "hi"}}}, "RESPONSE_REJECTED"),
        ("/status/500", {"expect": {"contains": '"said"'}}, "HTTP_STATUS"),
    ],
)
def test_responses_are_judged_by_status_and_body(
    post: Post, path: str, options: dict[str, Any], code: str | None
) -> None:
    outcome, _ = post(path, **options)
    assert (outcome.code, outcome.delivered, outcome.receiver_gone) == (code, code is None, False)


def test_the_body_check_reads_beyond_the_stored_part(run: Run, delivery: Delivery) -> None:
    class Large(Sink):
        async def large(self, reader: Any, writer: Any, line: str) -> None:
            await self.answer(writer, "200 OK", b"x" * 50_000 + b"END")

    async def main() -> Outcome:
        async with sink(server_state=Large()) as server:
            url = f"http://a.example:{server.port}/large"
            return await deliver_once(local(), delivery, {"url": url, "expect": {"contains": "END"}})

    outcome = run(main())
    assert outcome.delivered
    assert len(outcome.result["body"]) == 4096


# --- Timeouts -------------------------------------------------------------------------------------------


def test_a_target_has_its_own_timeout(post: Post) -> None:
    outcome, _ = post("/hang", local(timeout=60), timeout=0.2)
    assert (outcome.code, outcome.error) == ("TIMEOUT", "The receiver sent no complete response within 0.2 s.")


def test_cancellation_closes_the_request(run: Run, delivery: Delivery) -> None:
    async def main() -> None:
        async with sink() as server:
            options = {"url": f"http://a.example:{server.port}/hang", "timeout": "30m"}
            task = asyncio.create_task(deliver_once(local(), delivery, options))
            while not server.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait_for(server.gone.wait(), 30)

    run(main())


# --- Redirects ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "method", "expected"),
    [(301, "GET", "GET"), (302, "POST", "GET"), (303, "PUT", "GET"), (307, "POST", "POST"), (308, "PUT", "PUT"),
     (303, "HEAD", "HEAD")],
)  # fmt: skip
def test_redirects_are_followed_if_requested(post: Post, status: int, method: str, expected: str) -> None:
    outcome, server = post(f"/moved/{status}/status/200", method=method, followRedirects=True)
    assert outcome.delivered
    assert [request.line for request in server.requests] == [
        f"{method} /moved/{status}/status/200 HTTP/1.1", f"{expected} /status/200 HTTP/1.1"
    ]  # fmt: skip
    assert bool(server.requests[1].body) is (expected in ("POST", "PUT"))
    assert "webhook-signature" in server.requests[1].headers


def test_redirects_are_not_followed_by_default(post: Post) -> None:
    outcome, server = post("/moved/302/status/200", method="GET")
    assert (outcome.code, len(server.requests)) == ("HTTP_STATUS", 1)


def test_at_most_five_redirects_are_followed(post: Post) -> None:
    outcome, server = post("/moved/302/moved/302/moved/302/moved/302/moved/302/moved/302/status/200",
                           method="GET", followRedirects=True)  # fmt: skip
    assert (outcome.code, outcome.result["status"], len(server.requests)) == ("HTTP_STATUS", 302, 6)


def test_a_redirect_to_another_origin_carries_no_credentials(run: Run, delivery: Delivery) -> None:
    async def main() -> tuple[Outcome, Sink, Sink]:
        async with sink() as first, sink() as second:
            url = f"http://a.example:{first.port}/moved/302/?to=http://b.example:{second.port}/status/200"
            options = {
                "url": url, "method": "GET", "followRedirects": True, "headers": {"x-key": "k", "cookie": "c=d"},
                "auth": {"type": "bearer", "token": "token-1"},
            }  # fmt: skip
            return await deliver_once(local(), delivery, options), first, second

    outcome, first, second = run(main())
    assert outcome.delivered
    assert first.requests[0].headers["authorization"] == "Bearer token-1"
    assert set(second.requests[0].headers) == {"host", "user-agent", "accept-encoding", "connection"}


@pytest.mark.parametrize("status", [307, 308])
def test_a_body_is_never_redirected_to_another_origin(run: Run, delivery: Delivery, status: int) -> None:
    async def main() -> tuple[Outcome, Sink]:
        async with sink() as first, sink() as second:
            url = f"http://a.example:{first.port}/moved/{status}/?to=http://b.example:{second.port}/status/200"
            return await deliver_once(local(), delivery, {"url": url, "followRedirects": True}), second

    outcome, second = run(main())
    assert (outcome.code, second.requests) == ("HTTP_STATUS", [])


@pytest.mark.parametrize(
    "location",
    ["http://169.254.169.254/latest/meta-data", "http://127.0.0.1:5432/", "http://[::1]/", "ftp://b.example/",
     "http://u:p@b.example/", "http://2130706433/", "//0x7f.1/", "http://internal.example:{port}/",
     "http://a.example:5432/"],
)  # fmt: skip
def test_the_guard_checks_every_redirect(run: Run, delivery: Delivery, location: str) -> None:
    hits: list[str] = []

    class Recorder(http_client.Network):
        async def connect(self, address: str, port: int, timeout: float) -> http_client.Stream:
            hits.append(address)
            return await super().connect(address, port, timeout)

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.2"] if host == "a.example" else ["10.0.0.1"]

    async def main() -> Outcome:
        # 127.0.0.2 is the only allowed address.
        guard = AddressGuard(allow=["127.0.0.2/32"], resolve=resolve)
        server_state = Sink()
        server = await asyncio.start_server(server_state.serve, "127.0.0.2", 0)
        port = server.sockets[0].getsockname()[1]
        target = HttpTarget(SECRET, now=lambda: NOW, guard=guard)
        target.connections.network = Recorder()
        url = f"http://a.example:{port}/moved/302/?to={location.format(port=port)}"
        async with server:
            return await deliver_once(target, delivery, {"url": url, "method": "GET", "followRedirects": True})

    assert run(main()).code == "ADDRESS_REFUSED"
    assert hits == ["127.0.0.2"]


def test_preview_shows_method_query_and_body(delivery: Delivery) -> None:
    target = local()
    options = target.check({"url": "http://a.example/", "method": "PUT", "query": {"a": "b"}, "body": "json"})
    preview = target.preview(delivery, options)
    assert (preview["method"], preview["url"]) == ("PUT", "http://a.example/?a=b")
    assert json.loads(preview["body"]) == delivery.payload
