"""Deliver by a signed POST: Standard Webhooks 1.0 headers, and a JSON body (`timebell.targets.bodies`).

What counts (Standard Webhooks, "Delivery success and failure"; Svix does the same): 2xx is delivered; every
other status fails and is tried again, 4xx too, since most are a deploy gone wrong; 410 Gone alone is final.
Redirects are never followed, so a signature goes to no host but the one that was registered.

`timebell.http_client` does the talking; the address guard sits where it connects. Host, SNI and certificate go by
the name
in
the URL; only the TCP connection goes by the checked address. One attempt is one connection: no tenant gets another's,
and none that the receiver has dropped while it idled.
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
from timebell.targets.address import AddressGuard, Place
from timebell.targets.base import KEPT_BYTES, Delivery, Outcome, message_id, only, retry_after, text
from timebell.tenancy.tokens import token_of

CONNECT_SECONDS = 5.0
LONGEST_TIMEOUT = 30.0
BODY_BYTES = 64 * 1024
ADDRESSES_TRIED = 4
ACCEPTED = 202
GONE = 410
OPTIONS = ("url", "headers", "reportsBack", "signingSecrets", *bodies.OPTIONS)

_TO_MAKE_ONE = "To make one: echo whsec_$(openssl rand -base64 32)"
_NO_SECRET = (
    "Webhooks are signed, and there is no signing secret.",
    f"Set TIMEBELL_WEBHOOK_SIGNING_SECRET. {_TO_MAKE_ONE}",
)
_WHEN_SENT = "(made when it is sent)"
_HEADER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]{0,1022}[!-~])?")
_OWN_HEADERS = re.compile(
    r"host|connection|keep-alive|te|trailer|transfer-.*|upgrade|expect|proxy-.*|accept-encoding|content-.*"
    r"|webhook-.*|timebell-.*",
    re.IGNORECASE,
)


class HttpTarget:
    """POSTs to `url`. Options: `url`, `headers` (optional), those of the body (by default "cloudevents"), and
    `reportsBack`: whether a 202 means that the receiver will say itself what becomes of the job,
    `signingSecrets`: of a target under a name, its own, in place of `signing_secret`.

    `signing_secret` is one or more `whsec_...`, separated by spaces or commas: while a secret is rotated each
    request carries a signature by every one. `timeout` (seconds, at most 30) covers the whole exchange.
    `now` gives the time of each attempt, `guard` decides where requests may go, `secret_key` makes the tokens of
    receivers that report back. Raises InvalidInput (SIGNING_SECRET_INVALID, TIMEOUT_INVALID).
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
        if not 0 < timeout <= LONGEST_TIMEOUT:
            raise InvalidInput("A webhook's timeout is more than 0 and at most 30 s.", code="TIMEOUT_INVALID")
        self._signers = signers(re.split(r"[\s,]+", signing_secret or ""))
        self._timeout = timeout
        self._now = now
        self._secret_key = secret_key
        self._guard = guard or AddressGuard()
        self._dial: http_client.Network = http_client.Network()
        self._tls = tls  # the system's authorities take a while to load: not before they are needed

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Raises InvalidInput (URL_INVALID, HEADER_INVALID, TARGET_OPTIONS_INVALID, TEMPLATE_INVALID) or Refused
        (SIGNING_SECRET_MISSING, SECRET_KEY_MISSING, PRIVATE_ADDRESS, PORT_REFUSED, HTTP_OFF)."""
        only(options, OPTIONS)
        body = bodies.checked(options)
        if not self._of(options):
            raise Refused(_NO_SECRET[0], code="SIGNING_SECRET_MISSING", fix=_NO_SECRET[1])
        url = self._guard.place(options.get("url")).url
        checked: dict[str, Any] = {"url": url, "headers": _headers(options.get("headers")), **body}
        reports = options.get("reportsBack", False)
        if not isinstance(reports, bool):
            raise InvalidInput(
                f"reportsBack cannot be {reports!r:.60}.", code="TARGET_OPTIONS_INVALID", fix="Use true or false."
            )
        if reports:
            token_of(self._secret_key, "", 0)  # raises where none can be made
            checked["reportsBack"] = True
        if "signingSecrets" in options:
            checked["signingSecrets"] = options["signingSecrets"]
        return checked

    def _of(self, options: dict[str, Any]) -> list[bytes]:
        """The keys that sign a request with these options."""
        return signers(options["signingSecrets"]) if "signingSecrets" in options else self._signers

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Codes of failure: HTTP_STATUS, CONNECT_FAILED, TLS_FAILED, TIMEOUT, ADDRESS_REFUSED,
        RESPONSE_UNREADABLE; and BODY_UNFIT, MESSAGE_TOO_LARGE, SIGNING_SECRET_MISSING, SECRET_KEY_MISSING."""
        if not self._of(options):
            return Outcome.failed("SIGNING_SECRET_MISSING", " ".join(_NO_SECRET), retryable=False)
        try:
            options = self.check(options)
            place = self._guard.place(options["url"])
        except (InvalidInput, Refused) as error:  # the rules became stricter since the job was made
            return Outcome.failed("ADDRESS_REFUSED", str(error), retryable=False)
        try:
            headers, body = self._request(delivery, options)
        except (InvalidPayload, Refused) as error:  # no body, or no token, can be made here
            return Outcome.failed(error.code, str(error), retryable=False)
        outcome = await self._exchange(place, headers, body, options)
        outcome.record = {"to": place.authority}
        if outcome.result is not None:
            outcome.record |= {"status": outcome.result["status"], "response": outcome.result["body"]}
        return outcome

    async def _exchange(self, place: Place, headers: dict[str, str], body: bytes, options: dict[str, Any]) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout):
                outcome = await self._post(place, headers, body)
            if outcome.delivered and outcome.result["status"] == ACCEPTED:
                outcome.reports = options.get("reportsBack", False)
        except TimeoutError:
            outcome = Outcome.failed("TIMEOUT", f"No full answer from the receiver within {self._timeout:g} s.")
        except Refused as error:
            outcome = Outcome.failed("ADDRESS_REFUSED", str(error))
        except http_client.ConnectError:
            outcome = Outcome.failed("CONNECT_FAILED", f"No connection to {place.authority}.")
        except http_client.TLSError:
            outcome = Outcome.failed("TLS_FAILED", f"{place.host} does not speak TLS with a certificate to trust.")
        except http_client.Broken:
            outcome = Outcome.failed("RESPONSE_UNREADABLE", "The receiver's answer broke off or is not HTTP.")
        outcome.sent = {"method": "POST", "url": place.url, "headers": headers, "body": body}
        return outcome

    def preview(self, delivery: Delivery, options: dict[str, Any]) -> dict[str, Any]:
        """The request that would be sent, by options that `check` returned; nobody could pass it off as sent: it has
        no signature and no token. Raises InvalidPayload (BODY_UNFIT, MESSAGE_TOO_LARGE)."""
        headers, body = self._request(delivery, options)
        secret = {name: _WHEN_SENT for name in ("webhook-signature", "timebell-token") if name in headers}
        host = self._guard.place(options["url"]).authority
        return {
            "method": "POST", "url": options["url"], "headers": {"host": host, **headers, **secret},
            "body": body.decode(),
        }  # fmt: skip

    async def close(self) -> None:
        """Nothing outlives an attempt."""

    def _request(self, delivery: Delivery, options: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        body = bodies.render(delivery, options)
        at = self._now().astimezone(UTC)
        key = message_id(delivery)
        headers = {
            "user-agent": "timebell",
            **options["headers"],
            "content-type": body.content_type,
            "accept-encoding": "identity",
            "connection": "close",
            "webhook-id": key,
            "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": " ".join(_signature(one, key, at, body.data) for one in self._of(options)),
            "timebell-attempt": str(delivery.attempt),
            **tracing.outgoing(),
        }
        if options.get("reportsBack", False):
            headers["timebell-token"] = token_of(self._secret_key, delivery.job_id, delivery.attempt)
        return headers, body.data

    async def _post(self, place: Place, headers: dict[str, str], body: bytes) -> Outcome:
        stream = await self._connect(place)
        try:
            if place.scheme == "https":
                self._tls = self._tls or http_client.trusted()
                await stream.open(self._tls, place.host)
            else:
                await stream.open()
            about = {"host": place.authority, **headers}
            answer = await http_client.exchange(
                stream, "POST", place.target, about, body, most=BODY_BYTES, kept=KEPT_BYTES
            )
        finally:
            stream.close()
        return _judge(answer, self._now())

    async def _connect(self, place: Place) -> http_client.Stream:
        """To a checked address, and to nothing else. Each gets an equal share of the time, so that one dead route does
        not use it up.

        A failure is told when all the time is over, whatever it was: how long it took tells nobody whether a
        port was closed or filtered, or a name unknown or private.
        """
        refused: Refused | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                try:
                    addresses = (await self._guard.addresses(place))[:ADDRESSES_TRIED]
                    for address in addresses:
                        with suppress(http_client.ConnectError):
                            return await self._dialled(address, place.port, CONNECT_SECONDS / len(addresses))
                except Refused as why:
                    refused = why
                await asyncio.Event().wait()
        except TimeoutError as error:
            raise refused or http_client.ConnectError from error
        raise AssertionError("waiting has no end but the timeout")

    async def _dialled(self, address: str, port: int, timeout: float) -> http_client.Stream:
        stream = await self._dial.connect(address, port, timeout)
        if stream.peer is not None and ipaddress.ip_address(stream.peer) == ipaddress.ip_address(address):
            return stream
        stream.close()
        raise http_client.ConnectError("the other end is not the address that was checked")


def _judge(answer: http_client.Answer, now: datetime) -> Outcome:
    status = answer.status
    result = {"status": status, "body": text(answer.body)}
    if 200 <= status < 300:
        return Outcome.ok(result)
    why = f"The receiver answered {status}."
    if 300 <= status < 400:
        why += " Redirects are not followed: give the final URL."
    wait = None
    if status in (429, 503):
        wait = retry_after(answer.header(b"retry-after"), now)
    failed = Outcome.failed("HTTP_STATUS", why, status != GONE, wait, result)
    failed.gone = status == GONE
    return failed


def signers(secrets: Iterable[str]) -> list[bytes]:
    """The keys of these secrets. Raises InvalidInput (SIGNING_SECRET_INVALID)."""
    return [_key(each) for each in secrets if each]


def new_signing_secret() -> str:
    """A signing secret of 32 bytes that nobody can guess."""
    return f"whsec_{base64.b64encode(os.urandom(32)).decode()}"


def _key(secret: str) -> bytes:
    """Standard Webhooks: `whsec_` and the base64 of 24 to 64 random bytes. The secret is in no error text."""
    prefix, _, encoded = secret.partition("_")
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if prefix != "whsec" or not 24 <= len(key) <= 64:
        raise InvalidInput(
            "A webhook signing secret is not whsec_ and the base64 of 24 to 64 bytes.",
            code="SIGNING_SECRET_INVALID",
            fix=_TO_MAKE_ONE,
        )
    return key


def _signature(key: bytes, message: str, at: datetime, body: bytes) -> str:
    """As Standard Webhooks 1.0 has it: of id, second and body, by HMAC-SHA256."""
    signed = b"%s.%d.%s" % (message.encode(), int(at.timestamp()), body)
    return f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"


def _headers(given: Any) -> dict[str, str]:
    """Extra headers, names in lower case. Visible ASCII only, and none that frames or signs the request."""
    if given is None:
        return {}
    if not isinstance(given, dict) or len(given) > 20:
        raise InvalidInput("headers is not an object of at most 20 entries.", code="HEADER_INVALID")
    for name, value in given.items():
        named = isinstance(name, str) and _HEADER_NAME.fullmatch(name) and not _OWN_HEADERS.fullmatch(name)
        if not named or not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise InvalidInput(
                f"The header {name!r} cannot be set.",
                code="HEADER_INVALID",
                fix="Names are letters, digits, - and _; values are 1 to 1,024 visible ASCII characters. "
                "Host, Connection, Content-*, Webhook-* and others of the protocol are reserved.",
            )
    return {name.lower(): value for name, value in given.items()}
