"""Authentication of requests: bearer, basic, OAuth 2 client credentials and OIDC identity tokens.

Tokens are requested through the same guarded connections as the requests themselves, and cached in memory per tenant.
OAuth 2 follows RFC 6749 (4.4). An identity token is requested with an assertion signed by the key of a service account
(RFC 7523), as Google Cloud Run, Cloud Functions and Identity-Aware Proxy require it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import orjson

from timebell import http_client
from timebell.errors import InvalidInput, Refused
from timebell.targets.address import AddressGuard
from timebell.targets.http_connections import Channel, HttpConnections

if TYPE_CHECKING:
    from joserfc.jwk import RSAKey

REFRESH_MARGIN_SECONDS = 60.0
"""A token is refreshed this long before it expires, or after nine tenths of a short life."""
DEFAULT_TOKEN_SECONDS = 300.0
"""Life of a token whose response does not state it."""
ASSERTION_SECONDS = 3600
JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
MAX_TOKEN_RESPONSE_BYTES = 64 * 1024
MAX_CACHED_TOKENS = 1000
MEMBERS = {  # required and optional members of `auth`, by its type
    "bearer": (("token",), ()),
    "basic": (("username", "password"), ()),
    "oauth2": (("tokenUrl", "clientId", "clientSecret"), ("scope", "parameters", "clientAuthentication")),
    "oidc": (("audience", "credentials"), ()),
}
CREDENTIAL_FIELDS = ("client_email", "private_key_id", "token_uri", "private_key")
_TOKEN = re.compile(r"[!-~]{1,8192}")
_ERROR_CODE = re.compile(r"[a-z_]{1,60}")


class TokenError(Exception):
    """No token was received. The text contains no secrets."""


@dataclass(slots=True)
class _CachedToken:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    value: str = field(default="", repr=False)
    refresh_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Authorization:
    """The value of an Authorization header; `secret` is the part of it to mask."""

    value: str = field(repr=False)
    secret: str = field(repr=False)
    is_cached: bool = False
    """The token was requested earlier, so it may have been revoked since."""


def check_authentication(auth: Any, guard: AddressGuard) -> dict[str, Any]:
    """Validate `auth`. Raises InvalidInput (INVALID_TARGET_OPTIONS, INVALID_URL, INVALID_CREDENTIALS), Refused."""
    kind = auth.get("type") if isinstance(auth, dict) else None
    if not isinstance(kind, str) or kind not in MEMBERS:
        raise _invalid(f"auth.type cannot be {kind!r:.60}", f"Use {', '.join(MEMBERS)}.")
    required, optional = MEMBERS[kind]
    for name in auth.keys() - {"type", *required, *optional}:
        raise _invalid(f"auth has no member {name!r:.60}", f"{kind} has: {', '.join((*required, *optional))}.")
    for name in required + tuple(auth.keys() & {"scope"}):
        if not isinstance(auth.get(name), str) or not (auth[name] or kind == "basic"):
            raise _invalid(f"auth.{name} must be a string", f"{kind} requires: {', '.join(required)}.")
    if kind == "bearer" and not _TOKEN.fullmatch(auth["token"]):
        raise _invalid("auth.token contains characters that a header cannot have")
    if kind == "basic" and ":" in auth["username"]:
        raise _invalid("auth.username contains a colon")
    if kind == "basic" and not auth["username"] + auth["password"]:
        raise _invalid("auth.username and auth.password are empty")
    if kind == "oauth2":
        guard.check_url(auth["tokenUrl"])
        parameters = auth.get("parameters", {})
        if not isinstance(parameters, dict) or not all(isinstance(each, str) for each in parameters.values()):
            raise _invalid(
                "auth.parameters must be an object with string values",
                'Example: {"audience": "https://api.example.com"}.',
            )
        if auth.get("clientAuthentication", "header") not in ("header", "body"):
            raise _invalid("auth.clientAuthentication is neither header nor body")
    if kind == "oidc":
        guard.check_url(_parse_credentials(auth["credentials"]).token_uri)
    return dict(auth)


class Authenticator:
    """Creates Authorization headers. `now` returns the time by which tokens expire."""

    def __init__(self, connections: HttpConnections, now: Callable[[], datetime]) -> None:
        self._connections = connections
        self._now = now
        self._tokens: OrderedDict[bytes, _CachedToken] = OrderedDict()

    async def authorize(self, tenant_id: str, auth: Mapping[str, Any], channel: Channel) -> Authorization:
        """Return the authorization for a request.

        Raises TokenError, Refused (ADDRESS_REFUSED), HttpClientError.
        """
        if auth["type"] == "bearer":
            return Authorization(f"Bearer {auth['token']}", auth["token"])
        if auth["type"] == "basic":
            encoded = basic_credentials(auth["username"], auth["password"])
            return Authorization(f"Basic {encoded}", encoded)
        cached = self._cached_token(tenant_id, auth)
        async with cached.lock:  # concurrent deliveries share one request
            now = self._now().timestamp()
            is_cached = now < cached.refresh_at
            if not is_cached:
                cached.value, seconds = await self._request_token(tenant_id, auth, channel)
                cached.refresh_at = now + seconds - min(REFRESH_MARGIN_SECONDS, seconds / 10)
        return Authorization(f"Bearer {cached.value}", cached.value, is_cached)

    def discard(self, tenant_id: str, auth: Mapping[str, Any], rejected: Authorization) -> None:
        """Forget a cached token that a receiver rejected, unless it was replaced meanwhile."""
        cached = self._cached_token(tenant_id, auth)
        if cached.value == rejected.secret:
            cached.refresh_at = 0.0

    def _cached_token(self, tenant_id: str, auth: Mapping[str, Any]) -> _CachedToken:
        """Return the cache entry of these credentials. Its key is a digest, because they contain secrets."""
        key = hashlib.sha256(orjson.dumps([tenant_id, auth], option=orjson.OPT_SORT_KEYS)).digest()
        cached = self._tokens.setdefault(key, _CachedToken())
        self._tokens.move_to_end(key)
        if len(self._tokens) > MAX_CACHED_TOKENS:
            self._tokens.popitem(last=False)
        return cached

    async def _request_token(self, tenant_id: str, auth: Mapping[str, Any], channel: Channel) -> tuple[str, float]:
        """Request a token; return it with its life in seconds."""
        headers = {"accept": "application/json"}
        if auth["type"] == "oauth2":
            url, member = auth["tokenUrl"], "access_token"
            form = {"grant_type": "client_credentials", **auth.get("parameters", {})}
            if "scope" in auth:
                form["scope"] = auth["scope"]
            if auth.get("clientAuthentication", "header") == "body":
                form |= {"client_id": auth["clientId"], "client_secret": auth["clientSecret"]}
            else:  # both are form-encoded first (RFC 6749, 2.3.1)
                encoded = basic_credentials(quote(auth["clientId"], safe=""), quote(auth["clientSecret"], safe=""))
                headers["authorization"] = f"Basic {encoded}"
        else:
            account, member = _parse_credentials(auth["credentials"]), "id_token"
            url = account.token_uri
            form = {"grant_type": JWT_BEARER, "assertion": account.sign_assertion(auth["audience"], self._now())}
        endpoint = self._connections.guard.check_url(url)
        headers |= {
            "user-agent": "timebell", "content-type": "application/x-www-form-urlencoded",
            "accept-encoding": "identity", "connection": "keep-alive",
        }  # fmt: skip
        response = await self._connections.exchange(
            tenant_id, endpoint, channel.without_certificate(), "POST", headers, urlencode(form).encode(),
            kept_bytes=MAX_TOKEN_RESPONSE_BYTES,
        )  # fmt: skip
        return self._read_token(response, endpoint.authority, member)

    def _read_token(self, response: http_client.HttpResponse, authority: str, member: str) -> tuple[str, float]:
        """Return the token of a response and its life in seconds. Raises TokenError."""
        document = None
        with suppress(orjson.JSONDecodeError):
            document = orjson.loads(response.body)
        document = document if isinstance(document, dict) else {}
        if response.status != 200:
            code = document.get("error")
            detail = f" {code}" if isinstance(code, str) and _ERROR_CODE.fullmatch(code) else ""
            raise TokenError(f"The token endpoint {authority} answered {response.status}{detail}.")
        token, kind = document.get(member), document.get("token_type", "bearer")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise TokenError(f"The response of the token endpoint {authority} contains no {member}.")
        if member == "access_token" and str(kind).lower() != "bearer":
            raise TokenError(f"The token endpoint {authority} issued a token of type {kind!r:.40}, not bearer.")
        seconds = document.get("expires_in")
        if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit():
            seconds = int(seconds[:9])
        if not isinstance(seconds, int | float) or seconds <= 0:
            seconds = _remaining_seconds(token, self._now())
        return token, float(seconds)


def basic_credentials(username: str, password: str) -> str:
    """Return user name and password encoded for an Authorization header (RFC 7617)."""
    return base64.b64encode(f"{username}:{password}".encode()).decode()


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """The key file of a service account."""

    client_email: str
    private_key_id: str
    token_uri: str
    key: RSAKey = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> ServiceAccount:
        """Parse a JSON key file. Raises InvalidInput (INVALID_CREDENTIALS), Refused (EXTRA_MISSING)."""
        try:
            from joserfc.errors import JoseError
            from joserfc.jwk import RSAKey
        except ImportError as error:
            raise Refused(
                "Identity tokens need the package joserfc, which is not installed.", code="EXTRA_MISSING",
                fix='Run: pip install "timebell[oidc]".',
            ) from error  # fmt: skip
        try:
            document = orjson.loads(text)
            fields = [document[name] for name in CREDENTIAL_FIELDS]
            if not all(isinstance(each, str) for each in fields):
                raise ValueError
            email, key_id, token_uri, private_key = fields
            return cls(email, key_id, token_uri, RSAKey.import_key(private_key))
        except (JoseError, ValueError, TypeError, KeyError):
            raise InvalidInput(
                "auth.credentials is not the key of a service account.", code="INVALID_CREDENTIALS",
                fix=f"Use the JSON key file, with {', '.join(CREDENTIAL_FIELDS)}.",
            ) from None  # the cause may contain the key  # fmt: skip

    def sign_assertion(self, audience: str, now: datetime) -> str:
        """Sign a request for an identity token (RFC 7523, 2.1)."""
        from joserfc import jwt

        issued_at = int(now.timestamp())
        header = {"alg": "RS256", "typ": "JWT", "kid": self.private_key_id}
        claims = {
            "iss": self.client_email, "sub": self.client_email, "aud": self.token_uri, "iat": issued_at,
            "exp": issued_at + ASSERTION_SECONDS, "target_audience": audience,
        }  # fmt: skip
        return jwt.encode(header, claims, self.key)


@lru_cache(maxsize=256)
def _parse_credentials(text: str) -> ServiceAccount:
    """Return the service account of a key file. Cached, because loading a private key is slow."""
    return ServiceAccount.parse(text)


def _remaining_seconds(token: str, now: datetime) -> float:
    """Return the remaining life of a JWT by its claim `exp`; DEFAULT_TOKEN_SECONDS for any other token."""
    try:
        claims = orjson.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        return max(0.0, float(claims["exp"]) - now.timestamp())
    except (ValueError, TypeError, KeyError, IndexError):
        return DEFAULT_TOKEN_SECONDS


def _invalid(problem: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_TARGET_OPTIONS", fix=fix)
