"""Deliver webhooks: a signed POST with Standard Webhooks 1.0 headers and a JSON body (`timebell.targets.bodies`).

Outcomes follow Standard Webhooks ("Delivery success and failure"), as Svix does: 2xx means delivered; every other
status is a failure that is retried, also 4xx, because most of these are faulty deployments; only 410 Gone is final.
Redirects are never followed, so a signature is sent only to the registered host.

`timebell.http_client` sends the request, and the address guard checks the address of every delivery. Host, SNI and
certificate verification use the name in the URL; only the TCP connection uses the checked address. A delivery may use
an open connection of its own tenant to the same endpoint and address. If the receiver closes that connection without a
response, which happens when it was idle for too long, the request is sent again on a new connection.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from timebell import http_client, tracing
from timebell.errors import InvalidInput, InvalidPayload, Refused
from timebell.targets import bodies
from timebell.targets.address import AddressGuard, Endpoint
from timebell.targets.base import (
    STORED_OUTPUT_BYTES,
    Delivery,
    Outcome,
    decode_text,
    message_id,
    parse_retry_after,
    reject_unknown_options,
)
from timebell.targets.idle_connections import ConnectionKey, IdleConnections
from timebell.tenancy.tokens import attempt_token

CONNECT_SECONDS = 5.0
MAX_TIMEOUT_SECONDS = 30.0
MAX_RESPONSE_BYTES = 64 * 1024
MAX_ADDRESSES_TRIED = 4
STATUS_ACCEPTED = 202
STATUS_GONE = 410
OPTIONS = ("url", "headers", "reportsBack", "signingSecrets", *bodies.OPTIONS)

_CREATE_SIGNING_KEY_FIX = "To create one: echo whsec_$(openssl rand -base64 32)"
_SECRET_MISSING = (
    "Webhooks must be signed, but no signing secret is configured.",
    f"Set TIMEBELL_WEBHOOK_SIGNING_SECRET. {_CREATE_SIGNING_KEY_FIX}",
)
_PREVIEW_PLACEHOLDER = "(generated when sent)"
_HEADER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]{0,1022}[!-~])?")
_RESERVED_HEADERS = re.compile(
    r"host|connection|keep-alive|te|trailer|transfer-.*|upgrade|expect|proxy-.*|accept-encoding|content-.*"
    r"|webhook-.*|timebell-.*",
    re.IGNORECASE,
)


class HttpTarget:
    """POSTs to a URL.

    Options: `url`; optionally `headers`, the body options (by default "cloudevents"), `reportsBack` (a 202 means that
    the receiver will report the result of the job), and `signingSecrets` (of a named target, instead of
    `signing_secret`).

    `signing_secret` is one or more `whsec_...`, separated by spaces or commas; during a rotation, each request is
    signed with all of them. `timeout` (seconds, at most 30) covers the whole exchange. `now` returns the time of an
    attempt, `guard` decides which addresses are allowed, and `secret_key` signs the tokens of receivers that report
    back. Raises InvalidInput (INVALID_SIGNING_SECRET, INVALID_TIMEOUT).
    """

    kind = "http"

    def __init__(
        self,
        signing_secret: str | None,
        timeout: float = 10.0,
        *,
        now: Callable[[], datetime],
        guard: AddressGuard | None = None,
        tls: ssl.SSLContext | None = None,
        secret_key: str | None = None,
    ) -> None:
        if not 0 < timeout <= MAX_TIMEOUT_SECONDS:
            raise InvalidInput("The timeout of a webhook must be more than 0 and at most 30 s.", code="INVALID_TIMEOUT")
        self._default_signing_keys = signing_keys(re.split(r"[\s,]+", signing_secret or ""))
        self._timeout = timeout
        self._now = now
        self._secret_key = secret_key
        self._guard = guard or AddressGuard()
        self._network: http_client.Network = http_client.Network()
        self._idle_connections = IdleConnections()
        self._tls = tls  # created on first use, because loading the system's CA certificates is slow

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate options.

        Raises InvalidInput (INVALID_URL, INVALID_HEADER, INVALID_TARGET_OPTIONS, INVALID_TEMPLATE) or Refused
        (SIGNING_SECRET_MISSING, SECRET_KEY_MISSING, PRIVATE_ADDRESS, PORT_REFUSED, HTTP_OFF).
        """
        reject_unknown_options(options, OPTIONS)
        body = bodies.check_options(options)
        if not self._signing_keys(options):
            raise Refused(_SECRET_MISSING[0], code="SIGNING_SECRET_MISSING", fix=_SECRET_MISSING[1])
        url = self._guard.check_url(options.get("url")).url
        checked: dict[str, Any] = {"url": url, "headers": _check_headers(options.get("headers")), **body}
        reports_back = options.get("reportsBack", False)
        if not isinstance(reports_back, bool):
            raise InvalidInput(
                f"reportsBack cannot be {reports_back!r:.60}.", code="INVALID_TARGET_OPTIONS", fix="Use true or false."
            )
        if reports_back:
            attempt_token(self._secret_key, "", 0)  # raises if the secret key is missing
            checked["reportsBack"] = True
        if "signingSecrets" in options:
            checked["signingSecrets"] = options["signingSecrets"]
        return checked

    def _signing_keys(self, options: dict[str, Any]) -> list[bytes]:
        """Return the signing keys for these options."""
        return signing_keys(options["signingSecrets"]) if "signingSecrets" in options else self._default_signing_keys

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Send the request.

        Failure codes: HTTP_STATUS, CONNECT_FAILED, TLS_FAILED, TIMEOUT, ADDRESS_REFUSED, RESPONSE_UNREADABLE; and
        INVALID_BODY, MESSAGE_TOO_LARGE, SIGNING_SECRET_MISSING, SECRET_KEY_MISSING.
        """
        if not self._signing_keys(options):
            return Outcome.failed("SIGNING_SECRET_MISSING", " ".join(_SECRET_MISSING), retryable=False)
        try:
            options = self.check(options)
            endpoint = self._guard.check_url(options["url"])
        except (InvalidInput, Refused) as error:  # the rules became stricter since the job was created
            return Outcome.failed("ADDRESS_REFUSED", str(error), retryable=False)
        try:
            headers, body = self._request(delivery, options)
        except (InvalidPayload, Refused) as error:  # the body or the token cannot be created
            return Outcome.failed(error.code, str(error), retryable=False)
        outcome = await self._exchange(delivery.tenant_id, endpoint, headers, body, options)
        outcome.record = {"to": endpoint.authority}
        if outcome.result is not None:
            outcome.record |= {"status": outcome.result["status"], "response": outcome.result["body"]}
        return outcome

    async def _exchange(
        self, tenant_id: str, endpoint: Endpoint, headers: dict[str, str], body: bytes, options: dict[str, Any]
    ) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout):
                outcome = await self._post(tenant_id, endpoint, headers, body)
            if outcome.delivered and outcome.result["status"] == STATUS_ACCEPTED:
                outcome.awaits_report = options.get("reportsBack", False)
        except TimeoutError:
            outcome = Outcome.failed("TIMEOUT", f"The receiver sent no complete response within {self._timeout:g} s.")
        except Refused as error:
            outcome = Outcome.failed("ADDRESS_REFUSED", str(error))
        except http_client.ConnectError:
            outcome = Outcome.failed("CONNECT_FAILED", f"No connection to {endpoint.authority}.")
        except http_client.TLSError:
            outcome = Outcome.failed(
                "TLS_FAILED", f"{endpoint.host} has no trusted certificate, or does not support TLS."
            )
        except http_client.ProtocolError:
            outcome = Outcome.failed("RESPONSE_UNREADABLE", "The receiver's response is incomplete or not HTTP.")
        outcome.sent_request = {"method": "POST", "url": endpoint.url, "headers": headers, "body": body}
        return outcome

    def preview(self, delivery: Delivery, options: dict[str, Any]) -> dict[str, Any]:
        """Return the request that would be sent, with options returned by `check`.

        Signature and token are replaced, so that a preview cannot be replayed. Raises InvalidPayload (INVALID_BODY,
        MESSAGE_TOO_LARGE).
        """
        headers, body = self._request(delivery, options)
        placeholders = {
            name: _PREVIEW_PLACEHOLDER for name in ("webhook-signature", "timebell-token") if name in headers
        }
        host = self._guard.check_url(options["url"]).authority
        return {
            "method": "POST", "url": options["url"], "headers": {"host": host, **headers, **placeholders},
            "body": body.decode(),
        }  # fmt: skip

    async def close(self) -> None:
        """Close the idle connections."""
        self._idle_connections.close()

    def _request(self, delivery: Delivery, options: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        body = bodies.render(delivery, options)
        sent_at = self._now().astimezone(UTC)
        id_ = message_id(delivery)
        headers = {
            "user-agent": "timebell",
            **options["headers"],
            "content-type": body.content_type,
            "accept-encoding": "identity",
            "connection": "keep-alive",
            "webhook-id": id_,
            "webhook-timestamp": str(int(sent_at.timestamp())),
            "webhook-signature": " ".join(
                sign_webhook(key, id_, sent_at, body.data) for key in self._signing_keys(options)
            ),
            "timebell-attempt": str(delivery.attempt),
            **tracing.outgoing_headers(),
        }
        if options.get("reportsBack", False):
            headers["timebell-token"] = attempt_token(self._secret_key, delivery.job_id, delivery.attempt)
        return headers, body.data

    async def _post(self, tenant_id: str, endpoint: Endpoint, headers: dict[str, str], body: bytes) -> Outcome:
        stream, key, is_reused = await self._connect(tenant_id, endpoint)
        if is_reused:
            try:
                return await self._post_on(stream, key, endpoint, headers, body)
            except http_client.NoResponse:
                stream, key, _ = await self._connect(tenant_id, endpoint, reuse=False)
        try:
            await self._open(stream, endpoint)
        except BaseException:
            stream.close()
            raise
        return await self._post_on(stream, key, endpoint, headers, body)

    async def _open(self, stream: http_client.Stream, endpoint: Endpoint) -> None:
        if endpoint.scheme == "https":
            self._tls = self._tls or http_client.tls_context()
            await stream.open(self._tls, endpoint.host)
        else:
            await stream.open()

    async def _post_on(
        self, stream: http_client.Stream, key: ConnectionKey, endpoint: Endpoint, headers: dict[str, str], body: bytes
    ) -> Outcome:
        """Send the request on an open connection, and keep that if the receiver allows it."""
        keeps_connection = False
        try:
            response = await http_client.exchange(
                stream,
                "POST",
                endpoint.target,
                {"host": endpoint.authority, **headers},
                body,
                max_bytes=MAX_RESPONSE_BYTES,
                kept_bytes=STORED_OUTPUT_BYTES,
            )
            keeps_connection = response.keeps_connection
        finally:
            if keeps_connection:
                self._idle_connections.put(key, stream)
            else:
                stream.close()
        return _outcome_of(response, self._now())

    async def _connect(
        self, tenant_id: str, endpoint: Endpoint, *, reuse: bool = True
    ) -> tuple[http_client.Stream, ConnectionKey, bool]:
        """Connect to a checked address, or take an open connection to one; the last value tells which.

        All addresses share the time equally, so that one dead route cannot use it up. A failure is always reported
        after the whole time. Otherwise the duration would reveal whether a port is closed or filtered, or whether a
        name is unknown or private.
        """
        refused: Refused | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                try:
                    addresses = (await self._guard.resolve(endpoint))[:MAX_ADDRESSES_TRIED]
                    keys = [ConnectionKey.of(tenant_id, endpoint, address) for address in addresses]
                    for key in keys if reuse else ():
                        if (stream := self._idle_connections.take(key)) is not None:
                            return stream, key, True
                    for address, key in zip(addresses, keys, strict=True):
                        with suppress(http_client.ConnectError):
                            stream = await self._connect_verified(
                                address, endpoint.port, CONNECT_SECONDS / len(addresses)
                            )
                            return stream, key, False
                except Refused as refusal:
                    refused = refusal
                await asyncio.Event().wait()
        except TimeoutError as error:
            raise refused or http_client.ConnectError from error
        raise AssertionError("only the timeout ends the wait")

    async def _connect_verified(self, address: str, port: int, timeout: float) -> http_client.Stream:
        stream = await self._network.connect(address, port, timeout)
        if stream.peer_address is not None and ipaddress.ip_address(stream.peer_address) == ipaddress.ip_address(
            address
        ):
            return stream
        stream.close()
        raise http_client.ConnectError("the peer address is not the checked address")


def _outcome_of(response: http_client.HttpResponse, now: datetime) -> Outcome:
    status = response.status
    result = {"status": status, "body": decode_text(response.body)}
    if 200 <= status < 300:
        return Outcome.ok(result)
    error = f"The receiver answered {status}."
    if 300 <= status < 400:
        error += " Redirects are not followed: use the final URL."
    retry_after = None
    if status in (429, 503):
        retry_after = parse_retry_after(response.header(b"retry-after"), now)
    outcome = Outcome.failed("HTTP_STATUS", error, status != STATUS_GONE, retry_after, result)
    outcome.receiver_gone = status == STATUS_GONE
    return outcome


def signing_keys(secrets: Iterable[str]) -> list[bytes]:
    """Decode signing secrets to keys. Raises InvalidInput (INVALID_SIGNING_SECRET)."""
    return [_decode_secret(secret) for secret in secrets if secret]


def new_signing_secret() -> str:
    """Generate a random signing secret of 32 bytes."""
    return f"whsec_{base64.b64encode(os.urandom(32)).decode()}"


def _decode_secret(secret: str) -> bytes:
    """Decode a Standard Webhooks secret: `whsec_` and the base64 of 24 to 64 bytes. Errors never contain the secret."""
    prefix, _, encoded = secret.partition("_")
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if prefix != "whsec" or not 24 <= len(key) <= 64:
        raise InvalidInput(
            "A webhook signing secret must be whsec_ and the base64 of 24 to 64 bytes.",
            code="INVALID_SIGNING_SECRET",
            fix=_CREATE_SIGNING_KEY_FIX,
        )
    return key


def sign_webhook(key: bytes, message: str, at: datetime, body: bytes) -> str:
    """Sign message id, timestamp and body with HMAC-SHA256 (Standard Webhooks 1.0)."""
    signed = b"%s.%d.%s" % (message.encode(), int(at.timestamp()), body)
    return f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"


def _check_headers(headers: Any) -> dict[str, str]:
    """Validate extra headers and return them with lower-case names.

    Values are visible ASCII; headers that frame or sign the request are reserved.
    """
    if headers is None:
        return {}
    if not isinstance(headers, dict) or len(headers) > 20:
        raise InvalidInput("headers must be an object with at most 20 entries.", code="INVALID_HEADER")
    for name, value in headers.items():
        is_allowed_name = (
            isinstance(name, str) and _HEADER_NAME.fullmatch(name) and not _RESERVED_HEADERS.fullmatch(name)
        )
        if not is_allowed_name or not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise InvalidInput(
                f"The header {name!r} cannot be set.",
                code="INVALID_HEADER",
                fix="Names are letters, digits, - and _; values are 1 to 1,024 visible ASCII characters. "
                "Host, Connection, Content-*, Webhook-* and other protocol headers are reserved.",
            )
    return {name.lower(): value for name, value in headers.items()}
