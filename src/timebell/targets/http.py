"""Deliver over HTTP: by default webhooks, which are signed POSTs with a JSON body (`timebell.targets.bodies`).

Outcomes follow Standard Webhooks ("Delivery success and failure"), as Svix does: 2xx means delivered, unless `success`
lists other statuses; every other status is a failure that is retried, also 4xx, because most of these are faulty
deployments; only 410 Gone is final.

Redirects are followed only with `followRedirects`. What identifies or authenticates the sender stays behind when a
redirect leads to another origin: signature, headers, authorization, client certificate and body.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from typing import Any
from urllib.parse import urljoin

import orjson

from timebell import http_client, tracing
from timebell.errors import InvalidInput, InvalidPayload, Refused
from timebell.model.target import MASK, mask_secrets
from timebell.targets import bodies
from timebell.targets.address import AddressGuard, Endpoint
from timebell.targets.base import Delivery, Outcome, message_id
from timebell.targets.http_authentication import Authenticator, Authorization, TokenError, basic_credentials
from timebell.targets.http_connections import Channel, HttpConnections, Proxy
from timebell.targets.http_options import check_options, check_timeout
from timebell.targets.http_request import HttpRequest
from timebell.targets.http_responses import STATUS_UNAUTHORIZED, judge_response, kept_bytes
from timebell.targets.webhook_signatures import CREATE_SIGNING_KEY_FIX, sign_webhook, signing_keys
from timebell.tenancy.tokens import attempt_token

STATUS_ACCEPTED = 202
STATUS_SEE_OTHER = 303
MAX_REDIRECTS = 5
MAX_CHECKED_OPTIONS = 10_000
MAX_TARGET_CHARACTERS = 8192
"""Maximum length of path and query."""
REDIRECTS_WITH_BODY = (307, 308)
"""Redirects that repeat the request with its method and body (RFC 9110, 15.4)."""
REDIRECTS = (301, 302, STATUS_SEE_OTHER, *REDIRECTS_WITH_BODY)
PUBLIC_HEADERS = ("user-agent", "accept-encoding", "connection")
"""Headers that a redirect to another origin keeps."""

_SECRET_MISSING = (
    "Webhooks must be signed, but no signing secret is configured.",
    f"Set TIMEBELL_WEBHOOK_SIGNING_SECRET. {CREATE_SIGNING_KEY_FIX}",
)
_PREVIEW_PLACEHOLDER = "(generated when sent)"
_DIRECT_CHANNEL = Channel()


class HttpTarget:
    """Sends a request to a URL.

    The options are in docs/guides/http-targets.md. `signing_secret` is one or more `whsec_...`, separated by spaces or
    commas; during a rotation, each request is signed with all of them. `timeout` (seconds) covers the whole exchange,
    unless the options have another one. `now` returns the time of an attempt, `guard` decides which addresses are
    allowed, and `secret_key` signs the tokens of receivers that report back. Raises InvalidInput
    (INVALID_SIGNING_SECRET, INVALID_TIMEOUT).
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
        self._timeout = check_timeout(timeout)
        self._default_signing_keys = signing_keys(re.split(r"[\s,]+", signing_secret or ""))
        self._now = now
        self._secret_key = secret_key
        self._guard = guard or AddressGuard()
        self.connections = HttpConnections(self._guard, tls)
        self._authenticator = Authenticator(self.connections, now)
        self._checked_options: set[bytes] = set()
        """Digests of options that `check` returned unchanged; the options themselves may contain secrets."""

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate options.

        Raises InvalidInput (INVALID_URL, INVALID_HEADER, INVALID_TARGET_OPTIONS, INVALID_TEMPLATE, ...) or Refused
        (SIGNING_SECRET_MISSING, SECRET_KEY_MISSING, PRIVATE_ADDRESS, PORT_REFUSED, HTTP_OFF).
        """
        checked = check_options(options, self._guard)
        if not self._signing_keys(options):
            raise Refused(_SECRET_MISSING[0], code="SIGNING_SECRET_MISSING", fix=_SECRET_MISSING[1])
        if "reportsBack" in checked:
            attempt_token(self._secret_key, "", 0)  # raises if the secret key is missing
        return checked

    def _signing_keys(self, options: dict[str, Any]) -> list[bytes]:
        """Return the signing keys for these options."""
        return signing_keys(options["signingSecrets"]) if "signingSecrets" in options else self._default_signing_keys

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Send the request.

        Failure codes: HTTP_STATUS, RESPONSE_REJECTED, TOKEN_FAILED, CONNECT_FAILED, TLS_FAILED, TIMEOUT,
        ADDRESS_REFUSED, RESPONSE_UNREADABLE; and INVALID_BODY, MESSAGE_TOO_LARGE, SIGNING_SECRET_MISSING,
        SECRET_KEY_MISSING.
        """
        if not self._signing_keys(options):
            return Outcome.failed("SIGNING_SECRET_MISSING", " ".join(_SECRET_MISSING))  # another node may have one
        try:
            options = self._check_again(options)
            endpoint = self._guard.check_url(options["url"])
        except (InvalidInput, Refused) as error:  # the rules became stricter since the job was created
            # Another node may have other settings, as while they are changed on one node after the other.
            return Outcome.failed("ADDRESS_REFUSED", str(error), retryable=isinstance(error, Refused))
        try:
            request = self._request(delivery, options, endpoint)
        except (InvalidPayload, Refused) as error:  # the body or the token cannot be created
            return Outcome.failed(error.code, str(error), retryable=False)
        outcome = await self._exchange(request, options)
        outcome.record = {"to": endpoint.authority}
        if outcome.result is not None:
            outcome.record |= {"status": outcome.result["status"], "response": outcome.result["body"]}
        return outcome

    def _check_again(self, options: dict[str, Any]) -> dict[str, Any]:
        """Check options like `check`, unless this process has checked the same before."""
        digest = sha256(orjson.dumps(options)).digest()
        if digest in self._checked_options:
            return options
        checked = self.check(options)
        if checked == options:
            if len(self._checked_options) >= MAX_CHECKED_OPTIONS:
                self._checked_options.clear()
            self._checked_options.add(digest)
        return checked

    async def _exchange(self, request: HttpRequest, options: dict[str, Any]) -> Outcome:
        """Send a request and return its outcome, in which generated secrets are masked."""
        timeout = options.get("timeout", self._timeout)
        try:
            async with asyncio.timeout(timeout):
                response = await self._send(request, options)
            outcome = judge_response(response, options, self._now())
            if outcome.delivered and response.status == STATUS_ACCEPTED:
                outcome.awaits_report = options.get("reportsBack", False)
        except TimeoutError:
            outcome = Outcome.failed("TIMEOUT", f"The receiver sent no complete response within {timeout:g} s.")
        except (InvalidInput, Refused) as error:  # InvalidInput: the location of a redirect
            outcome = Outcome.failed("ADDRESS_REFUSED", str(error))
        except TokenError as error:
            outcome = Outcome.failed("TOKEN_FAILED", str(error))
        except http_client.ProxyRefused as error:
            outcome = Outcome.failed(
                "CONNECT_FAILED", f"No connection to {request.endpoint.authority}: the proxy answered {error}."
            )
        except http_client.ConnectError:
            outcome = Outcome.failed("CONNECT_FAILED", f"No connection to {request.endpoint.authority}.")
        except http_client.TLSError:
            outcome = Outcome.failed(
                "TLS_FAILED",
                f"{request.endpoint.host} has no trusted certificate, or does not support TLS."
                if request.channel.certificate is None
                else f"{request.endpoint.host} has no trusted certificate, or did not accept the client certificate.",
            )
        except http_client.ProtocolError:
            outcome = Outcome.failed("RESPONSE_UNREADABLE", "The receiver's response is incomplete or not HTTP.")
        if outcome.result is not None:
            outcome.result["body"] = mask_secrets(outcome.result["body"], request.secrets)
        request.result, outcome.exchange = outcome.result, request
        return outcome

    async def _send(self, request: HttpRequest, options: dict[str, Any]) -> http_client.HttpResponse:
        """Send a request, also to where it is redirected, and return the last response."""
        response = await self._send_authenticated(request, options)
        if not options.get("followRedirects", False):
            return response
        for _ in range(MAX_REDIRECTS):
            location = response.header(b"location")
            if response.status not in REDIRECTS or not location:
                return response
            if not self._redirect(request, response.status, location):
                return response
            response = await self._send_once(request, options)
        return response

    def _redirect(self, request: HttpRequest, status: int, location: str) -> bool:
        """Point a request to where it is redirected; False if it must not go there.

        Raises InvalidInput (INVALID_URL), Refused.
        """
        old = request.endpoint
        endpoint = self._guard.check_url(urljoin(old.url, location.partition("#")[0]))
        if old.scheme == "https" and endpoint.scheme != "https":
            return False
        is_same_origin = (old.scheme, old.host, old.port) == (endpoint.scheme, endpoint.host, endpoint.port)
        if status not in REDIRECTS_WITH_BODY and request.method not in ("GET", "HEAD"):
            request.method, request.body = "GET", b""
            request.headers.pop("content-type", None)
        if not is_same_origin:
            if request.body:
                return False
            request.headers = {name: value for name, value in request.headers.items() if name in PUBLIC_HEADERS}
            request.channel = request.channel.without_certificate()
        request.endpoint = endpoint
        return True

    async def _send_authenticated(self, request: HttpRequest, options: dict[str, Any]) -> http_client.HttpResponse:
        """Send a request with authorization, if there is one. A rejected token of the cache is replaced once."""
        if "auth" not in options:
            return await self._send_once(request, options)
        authorization = await self._authorize(request, options)
        response = await self._send_once(request, options)
        if response.status == STATUS_UNAUTHORIZED and authorization.is_cached:
            self._authenticator.discard(request.tenant_id, options["auth"], authorization)
            await self._authorize(request, options)
            response = await self._send_once(request, options)
        return response

    async def _authorize(self, request: HttpRequest, options: dict[str, Any]) -> Authorization:
        authorization = await self._authenticator.authorize(request.tenant_id, options["auth"], request.channel)
        request.headers["authorization"] = authorization.value
        request.secrets.add(authorization.secret)
        return authorization

    async def _send_once(self, request: HttpRequest, options: dict[str, Any]) -> http_client.HttpResponse:
        request.response = await self.connections.exchange(
            request.tenant_id, request.endpoint, request.channel, request.method, request.headers, request.body,
            kept_bytes=kept_bytes(options),
        )  # fmt: skip
        return request.response

    def preview(self, delivery: Delivery, options: dict[str, Any]) -> dict[str, Any]:
        """Return the request that would be sent, with options returned by `check`.

        Signature and tokens are replaced, so that a preview cannot be replayed. Raises InvalidPayload (INVALID_BODY,
        MESSAGE_TOO_LARGE).
        """
        request = self._request(delivery, options, self._guard.check_url(options["url"]))
        placeholders: dict[str, str] = {
            name: _PREVIEW_PLACEHOLDER for name in ("webhook-signature", "timebell-token") if name in request.headers
        }
        if "auth" in options:
            placeholders["authorization"] = MASK
        return {
            "method": request.method, "url": request.endpoint.url,
            "headers": {"host": request.endpoint.authority, **request.headers, **placeholders},
            "body": request.body.decode(),
        }  # fmt: skip

    async def close(self) -> None:
        """Close the idle connections."""
        self.connections.close()

    def _request(self, delivery: Delivery, options: dict[str, Any], endpoint: Endpoint) -> HttpRequest:
        body = bodies.render(delivery, options)
        headers = {"user-agent": "timebell", **options["headers"]}
        if body.content_type:
            headers["content-type"] = options.get("contentType", body.content_type)
        headers |= {"accept-encoding": "identity", "connection": "keep-alive"}
        if options.get("signed", True):
            sent_at, id_ = self._now(), message_id(delivery)
            headers["webhook-id"], headers["webhook-timestamp"] = id_, str(int(sent_at.timestamp()))
            headers["webhook-signature"] = " ".join(
                [sign_webhook(key, id_, sent_at, body.data) for key in self._signing_keys(options)]
            )
            headers["timebell-attempt"] = str(delivery.attempt)
        headers |= tracing.outgoing_headers()
        if options.get("reportsBack", False):
            headers["timebell-token"] = attempt_token(self._secret_key, delivery.job_id, delivery.attempt)
        return HttpRequest(
            delivery.tenant_id, options.get("method", "POST"), _with_query(endpoint, delivery, options), headers,
            body.data, self._channel(options),
        )  # fmt: skip

    def _channel(self, options: dict[str, Any]) -> Channel:
        if "tls" not in options and "proxy" not in options:
            return _DIRECT_CHANNEL
        tls, proxy = options.get("tls", {}), options.get("proxy")
        endpoint = None
        if proxy is not None:
            authorization = None
            if "username" in proxy:
                authorization = f"Basic {basic_credentials(proxy['username'], proxy['password'])}"
            endpoint = Proxy(self._guard.check_proxy(proxy["url"]), authorization)
        return Channel(endpoint, tls.get("ca"), tls.get("certificate"), tls.get("key"))


def _with_query(endpoint: Endpoint, delivery: Delivery, options: dict[str, Any]) -> Endpoint:
    """Return the endpoint with the query parameters. Raises InvalidPayload (INVALID_BODY)."""
    if query := bodies.render_query(delivery, options["query"]) if "query" in options else "":
        endpoint = replace(endpoint, target=f"{endpoint.target}{'&' if '?' in endpoint.target else '?'}{query}")
    if len(endpoint.target) > MAX_TARGET_CHARACTERS:
        raise InvalidPayload(
            f"Path and query would be {len(endpoint.target):,} characters; the limit is {MAX_TARGET_CHARACTERS:,}.",
            code="INVALID_BODY",
        )
    return endpoint
