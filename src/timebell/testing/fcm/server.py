"""`python -m timebell.testing.fcm.server FOLDER`: the fake FCM as a process of its own, until its stdin ends.

It writes `ca.pem` (trust it) and `credentials.json` (a service account) into the folder, then says its port.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import re
import ssl
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from google.auth import jwt

from timebell.testing.fcm.rules import Fcm, Quota, Reply, Rule
from timebell.testing.fcm.wire import Http2, Line

AUDIENCE = "https://oauth2.googleapis.com/token"
SCOPE = "https://www.googleapis.com/auth/firebase.messaging"
SCOPES = {SCOPE, "https://www.googleapis.com/auth/cloud-platform"}
ACCOUNT = "push@timebell-test.iam.gserviceaccount.com"


class Server:
    """The token endpoint, messages:send, and doors for tests under /fake."""

    def __init__(self, project: str, public_key: str, streams: int) -> None:
        self.fcm = Fcm(project, lambda: asyncio.get_running_loop().time())
        self.send_path = f"/v1/projects/{project}/messages:send"
        self.public_key, self.streams = public_key, streams
        self.lines: set[Line] = set()
        self.tokens: dict[str, float] = {}
        self.token_seconds = 3600.0
        self.exchanges = 0

    def line(self) -> Line:
        """A protocol for a new connection."""
        return Line(self.answer, self.streams, self.lines)

    def answer(self, method: str, path: str, authorization: str, body: bytes) -> Reply:
        """As in wire.Answer."""
        if path == self.send_path and method == "POST":
            until = self.tokens.get(authorization)
            if until is None or until < self.fcm.monotonic():
                return self.fcm.unauthenticated()
            return self.fcm.send(body)
        if path == "/token" and method == "POST":
            return self._exchange(body)
        if path.startswith("/fake/"):
            try:
                return _json(200, self._control(method, path, body))
            except (ValueError, TypeError, KeyError) as wrong:
                return _json(400, {"error": str(wrong)})
        return _json(404, {"error": {"code": 404, "message": "Not found.", "status": "NOT_FOUND"}})

    def _exchange(self, body: bytes) -> Reply:
        """RFC 7523: a signed assertion for an access token."""
        self.exchanges += 1
        form = parse_qs(body.decode())
        if form.get("grant_type") != ["urn:ietf:params:oauth:grant-type:jwt-bearer"]:
            return _json(400, {"error": "unsupported_grant_type"})
        try:
            claims = jwt.decode(form["assertion"][0], certs=self.public_key, audience=AUDIENCE)  # type: ignore[no-untyped-call]
        except (ValueError, KeyError) as wrong:
            return _json(400, {"error": "invalid_grant", "error_description": str(wrong)})
        if not SCOPES & set(str(claims.get("scope", "")).split()) or claims.get("iss") != ACCOUNT:
            return _json(400, {"error": "invalid_scope"})
        made = f"ya29.fake-{self.exchanges}-{'x' * 160}"
        self.tokens[f"Bearer {made}"] = self.fcm.monotonic() + self.token_seconds
        return _json(200, {"access_token": made, "expires_in": int(self.token_seconds), "token_type": "Bearer"})

    def _control(self, method: str, path: str, body: bytes) -> Any:
        asked: Any = orjson.loads(body) if body else None
        match method, urlsplit(path).path:
            case "POST", "/fake/rules":
                self.fcm.rules = [Rule(**each) for each in asked or []]
            case "POST", "/fake/quota":
                self.fcm.quota = None if asked is None else Quota(asked)
            case "POST", "/fake/reset":
                self.fcm.reset()
            case "POST", "/fake/tokens":  # how long new ones last; those there are, are void
                self.token_seconds = float(asked or 0)
                self.tokens.clear()
            case "POST", "/fake/goaway":  # politely: all that came is answered
                for line in list(self.lines):
                    if isinstance(line.spoken, Http2):
                        line.spoken.goaway(line.spoken.last)
                        line.spoken._flush()
            case "GET", "/fake/counts":
                wanted = ("requests", "accepted", "answered", "first", "last")
                twice = sum(len(ids) > 1 for ids in self.fcm.received.values())
                return {**{name: getattr(self.fcm, name) for name in wanted}, "targets": len(self.fcm.received),
                        "twice": twice, "exchanges": self.exchanges, "connections": len(self.lines),
                        "rules": [asdict(rule) for rule in self.fcm.rules]}  # fmt: skip
            case "GET", "/fake/received":
                return self.fcm.received
            case "GET", "/fake/bodies":
                return {to: [orjson.loads(each) for each in sent] for to, sent in self.fcm.bodies.items()}
            case _:
                raise ValueError(f"there is no {method} {path}")
        return {}


def _json(status: int, body: Any) -> Reply:
    return Reply(status, orjson.dumps(body))


def _certificate() -> tuple[bytes, bytes]:
    """A certificate of `localhost` that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )  # fmt: skip
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC)).not_valid_after(datetime(2120, 1, 1, tzinfo=UTC))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    return made.public_bytes(serialization.Encoding.PEM), _pem(key)


def _pem(key: Any) -> bytes:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    made: bytes = key.private_bytes(serialization.Encoding.PEM, form, plain)
    return made


async def serve(folder: Path, project: str, port: int, streams: int) -> None:
    """Until stdin ends."""
    certificate, key = _certificate()
    (folder / "ca.pem").write_bytes(certificate)
    (folder / "key.pem").write_bytes(key)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    tls.set_alpn_protocols(["h2", "http/1.1"])
    account = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
    public = account.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    server = Server(project, public.decode(), streams)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(server.line, "127.0.0.1", port, ssl=tls, backlog=1024)
    port = listening.sockets[0].getsockname()[1]
    credentials = {
        "type": "service_account", "project_id": project, "private_key_id": "1", "private_key": _pem(account).decode(),
        "client_email": ACCOUNT, "client_id": "1", "token_uri": f"https://localhost:{port}/token",
    }  # fmt: skip
    (folder / "credentials.json").write_text(json.dumps(credentials))
    sys.stdout.write(json.dumps({"port": port}) + "\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    listening.close()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m timebell.testing.fcm.server", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--project", default="timebell-test")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--streams", type=int, default=100, help="at once on a connection")
    given = parser.parse_args()
    if not re.fullmatch(r"[a-z0-9-]+", given.project):
        parser.error("a project is named with a-z, 0-9 and -")
    import uvloop

    uvloop.run(serve(given.folder, given.project, given.port, given.streams))


if __name__ == "__main__":
    main()
