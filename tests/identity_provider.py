"""An identity provider on loopback that follows the protocol, or breaks it as a test requires."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, Key, RSAKey

CLIENT_ID, CLIENT_SECRET = "timebell & co", "a secret: +%"
OWN_URL = "https://127.0.0.1:8700"
ROLE_MAP = 'admins=admin, acme-ops=operator@acme, "cn=sre,dc=example=platform"'


def encode(part: Any) -> str:
    """Encode a part of a token as base64url."""
    data = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class ProviderStandIn:
    """The provider: `claims` of the person who signs in, and what deviates from the protocol."""

    issuer: str = ""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    claims: dict[str, Any] = field(default_factory=lambda: {"sub": "u-1", "preferred_username": "dana"})
    user_info: dict[str, Any] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)
    id_token: str | None = None
    clock_offset_seconds: int = 0
    requests: list[str] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    keys: dict[str, Key] = field(default_factory=lambda: {"one": RSAKey.generate_key(2048, {"kid": "one"})})
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def token(self, *, header: dict[str, Any] | None = None, key: Key | None = None, **claims: Any) -> str:
        """Return a token that is valid unless the header, the key or a claim says otherwise; None omits a claim."""
        now = self.now().timestamp()
        content = {"iss": self.issuer, "aud": CLIENT_ID, "iat": now, "exp": now + 300} | self.claims | claims
        kid, newest = list(self.keys.items())[-1]
        head = {"alg": "ES256" if isinstance(newest, ECKey) else "RS256", "kid": kid} | (header or {})
        body = {name: value for name, value in content.items() if value is not None}
        return jwt.encode(head, body, key or newest, algorithms=[head["alg"]])

    def authorize(self, url: str, **changes: str | None) -> str:
        """Sign in like a person at this URL of the provider; return the path to which it sends the browser back."""
        asked = dict(parse_qsl(urlsplit(url).query, strict_parsing=True))
        assert url.startswith(f"{self.issuer}/authorize?")
        assert (asked["response_type"], asked["client_id"]) == ("code", CLIENT_ID)
        assert asked["redirect_uri"] == f"{OWN_URL}/ui/sign-in/callback"
        assert asked["code_challenge_method"] == "S256"
        code = f"code-{len(self.codes)}"
        self.codes[code] = asked
        answer = {"code": code, "state": asked["state"], "iss": self.issuer} | changes
        return "/ui/sign-in/callback?" + urlencode({k: v for k, v in answer.items() if v is not None})

    def respond(self, path: str, headers: Any, body: str) -> tuple[int, Any]:
        """Return status and JSON of a response."""
        self.requests.append(path)
        if path in self.failing:
            return 500, {}
        if path == "/.well-known/openid-configuration":
            urls = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "jwks",
                    "userinfo_endpoint": "me", "end_session_endpoint": "end"}  # fmt: skip
            document = {"issuer": self.issuer} | {name: f"{self.issuer}/{part}" for name, part in urls.items()}
            return 200, document | {"authorization_response_iss_parameter_supported": True} | self.configuration
        if path == "/jwks":
            return 200, {"keys": [{**key.as_dict(private=False), "kid": kid} for kid, key in self.keys.items()]}
        if path == "/me":
            assert headers["authorization"] == "Bearer access"
            return 200, {"sub": self.claims["sub"]} | self.user_info
        form = {name: values[0] for name, values in parse_qs(body).items()}
        asked = self.codes.pop(form["code"], None)
        challenge = encode(hashlib.sha256(form["code_verifier"].encode()).digest())
        secret = base64.b64encode(f"{'timebell+%26+co'}:{'a+secret%3A+%2B%25'}".encode()).decode()
        assert asked is None or form["code_verifier"] not in asked.values()  # which anyone who sees the URL knows
        if asked is None or challenge != asked["code_challenge"] or form["redirect_uri"] != asked["redirect_uri"]:
            return 400, {"error": "invalid_grant"}
        if headers["authorization"] != f"Basic {secret}":
            return 401, {"error": "invalid_client"}
        id_token = self.id_token or self.token(nonce=asked["nonce"])
        return 200, {"access_token": "access", "token_type": "Bearer", "id_token": id_token}


@contextmanager
def identity_provider(patch: pytest.MonkeyPatch) -> Iterator[ProviderStandIn]:
    """Run a provider and configure it by environment variables."""
    provider = ProviderStandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            status, document = provider.respond(self.path, self.headers, self.rfile.read(length).decode())
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string((timestamp or time.time()) + provider.clock_offset_seconds)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        provider.issuer = f"http://127.0.0.1:{listening.server_address[1]}"
        settings = {
            "URL": OWN_URL, "OIDC_ISSUER": provider.issuer, "OIDC_CLIENT_ID": CLIENT_ID,
            "OIDC_CLIENT_SECRET": CLIENT_SECRET, "OIDC_ROLE_MAP": ROLE_MAP,
        }  # fmt: skip
        for name, value in settings.items():
            patch.setenv(f"TIMEBELL_{name}", value)
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield provider
        finally:
            listening.shutdown()
            thread.join()


def forged_tokens(provider: ProviderStandIn, **claims: Any) -> dict[str, str]:
    """Return tokens that must be refused, by what is wrong with them."""
    now, stranger = provider.now().timestamp(), RSAKey.generate_key(2048, {"kid": "one"})
    valid = provider.token(**claims)
    header, payload, signature = valid.split(".")
    public = provider.keys["one"].as_pem(private=False)  # signed here, because joserfc refuses such a key
    by_secret = f"{encode({'alg': 'HS256', 'kid': 'one'})}.{payload}"
    return {
        "no signature": f"{encode({'alg': 'none', 'kid': 'one'})}.{payload}.",
        "alg none in capitals": f"{encode({'alg': 'NONE', 'kid': 'one'})}.{payload}.",
        "signature removed": f"{header}.{payload}.",
        "payload changed": f"{header}.{encode({**claims, 'sub': 'u-2'})}.{signature}",
        "another key of this id": provider.token(key=stranger, **claims),
        "a key that the token brings": provider.token(
            header={"jwk": stranger.as_dict(private=False)}, key=stranger, **claims
        ),
        "the public key as a secret": f"{by_secret}.{encode(hmac.digest(public, by_secret.encode(), 'sha256'))}",
        "an unknown key": provider.token(header={"kid": "two"}, key=stranger, **claims),
        "another issuer": provider.token(**claims | {"iss": "https://evil.example"}),
        "an issuer with a slash": provider.token(**claims | {"iss": provider.issuer + "/"}),
        "no issuer": provider.token(**claims | {"iss": None}),
        "another audience": provider.token(**claims | {"aud": "another"}),
        "other audiences": provider.token(**claims | {"aud": ["another", CLIENT_ID + "x"]}),
        "no audience": provider.token(**claims | {"aud": None}),
        "expired": provider.token(**claims | {"exp": now - 61}),
        "no end": provider.token(**claims | {"exp": None}),
        "an end as text": provider.token(**claims | {"exp": "tomorrow"}),
        "not yet valid": provider.token(**claims | {"nbf": now + 61}),
        "issued in the future": provider.token(**claims | {"iat": now + 61}),
        "no subject": provider.token(**claims | {"sub": None}),
        "a subject that is no text": provider.token(**claims | {"sub": 7}),
        "a subject of 256 characters": provider.token(**claims | {"sub": "x" * 256}),
        "not a token": "a.b.c",
        "a deep header": f"{encode(b'[' * 3000)}.{payload}.{signature}",
    }
