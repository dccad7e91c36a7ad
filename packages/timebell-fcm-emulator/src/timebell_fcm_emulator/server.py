"""`python -m timebell_fcm_emulator.server FOLDER`: run the fake FCM as a process until its stdin is closed.

It writes `ca.pem` (the certificate to trust) and `credentials.json` (a service account) to the folder, and then prints
its port as JSON.
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

from timebell_fcm_emulator.rules import Fcm, Quota, Reply, Rule
from timebell_fcm_emulator.wire import Connection, Http2

AUDIENCE = "https://oauth2.googleapis.com/token"
SCOPE = "https://www.googleapis.com/auth/firebase.messaging"
SCOPES = {SCOPE, "https://www.googleapis.com/auth/cloud-platform"}
ACCOUNT = "push@timebell-test.iam.gserviceaccount.com"


class Server:
    """Request handler for the token endpoint, `messages:send`, and the control endpoints for tests under /fake."""

    def __init__(self, project: str, public_key: str, streams: int) -> None:
        self.fcm = Fcm(project, lambda: asyncio.get_running_loop().time())
        self.send_path = f"/v1/projects/{project}/messages:send"
        self.public_key, self.streams = public_key, streams
        self.connections: set[Connection] = set()
        self.tokens: dict[str, float] = {}
        self.token_seconds = 3600.0
        self.refuses_account = False
        self.exchanges = 0

    def create_connection(self) -> Connection:
        """Create the protocol of a new connection."""
        return Connection(self.handle, self.streams, self.connections)

    def handle(self, method: str, path: str, authorization: str, body: bytes) -> Reply:
        """Handle a request; see `wire.RequestHandler`."""
        if path == self.send_path and method == "POST":
            valid_until = self.tokens.get(authorization)
            if valid_until is None or valid_until < self.fcm.monotonic():
                return self.fcm.unauthenticated()
            return self.fcm.send(body)
        if path == "/token" and method == "POST":
            return self._exchange(body)
        if path.startswith("/fake/"):
            try:
                return _json(200, self._control(method, path, body))
            except (ValueError, TypeError, KeyError) as error:
                return _json(400, {"error": str(error)})
        return _json(404, {"error": {"code": 404, "message": "Not found.", "status": "NOT_FOUND"}})

    def _exchange(self, body: bytes) -> Reply:
        """Exchange a signed assertion for an access token (RFC 7523)."""
        self.exchanges += 1
        form = parse_qs(body.decode())
        if form.get("grant_type") != ["urn:ietf:params:oauth:grant-type:jwt-bearer"]:
            return _json(400, {"error": "unsupported_grant_type"})
        try:
            claims = jwt.decode(form["assertion"][0], certs=self.public_key, audience=AUDIENCE)  # type: ignore[no-untyped-call]
        except (ValueError, KeyError) as error:
            return _json(400, {"error": "invalid_grant", "error_description": str(error)})
        if not SCOPES & set(str(claims.get("scope", "")).split()) or claims.get("iss") != ACCOUNT:
            return _json(400, {"error": "invalid_scope"})
        if self.refuses_account:
            return _json(400, {"error": "invalid_grant", "error_description": "Invalid grant: account not found"})
        token = f"ya29.fake-{self.exchanges}-{'x' * 160}"
        self.tokens[f"Bearer {token}"] = self.fcm.monotonic() + self.token_seconds
        return _json(200, {"access_token": token, "expires_in": int(self.token_seconds), "token_type": "Bearer"})

    def _control(self, method: str, path: str, body: bytes) -> Any:
        argument: Any = orjson.loads(body) if body else None
        match method, urlsplit(path).path:
            case "POST", "/fake/rules":
                self.fcm.rules = [Rule(**fields) for fields in argument or []]
            case "POST", "/fake/quota":
                self.fcm.quota = None if argument is None else Quota(argument)
            case "POST", "/fake/reset":
                self.fcm.reset()
                self.refuses_account = False
            case "POST", "/fake/tokens":  # the lifetime of new tokens; existing ones become invalid
                self.token_seconds = float(argument or 0)
                self.tokens.clear()
            case "POST", "/fake/account":
                self.refuses_account = bool(argument)
                self.tokens.clear()
            case "POST", "/fake/goaway":  # graceful: requests received so far are answered
                for connection in list(self.connections):
                    if isinstance(connection.protocol, Http2):
                        connection.protocol.send_goaway(connection.protocol.last_stream)
                        connection.protocol.flush()
            case "GET", "/fake/counts":
                names = ("requests", "accepted", "answered", "first", "last")
                return {
                    **{name: getattr(self.fcm, name) for name in names},
                    "targets": len(self.fcm.received),
                    "twice": sum(len(ids) > 1 for ids in self.fcm.received.values()),
                    "exchanges": self.exchanges,
                    "connections": len(self.connections),
                    "rules": [asdict(rule) for rule in self.fcm.rules],
                }
            case "GET", "/fake/received":
                return self.fcm.received
            case "GET", "/fake/bodies":
                return {
                    target: [orjson.loads(message) for message in messages]
                    for target, messages in self.fcm.bodies.items()
                }
            case _:
                raise ValueError(f"{method} {path} does not exist")
        return {}


def _json(status: int, body: Any) -> Reply:
    return Reply(status, orjson.dumps(body))


def _certificate() -> tuple[bytes, bytes]:
    """Return a self-signed certificate for `localhost`, which is also its own CA, and its key, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )  # fmt: skip
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC)).not_valid_after(datetime(2120, 1, 1, tzinfo=UTC))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    return certificate.public_bytes(serialization.Encoding.PEM), _pem(key)


def _pem(key: Any) -> bytes:
    format_, no_encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, format_, no_encryption)
    return pem


async def serve(folder: Path, project: str, port: int, streams: int) -> None:
    """Write the files, listen on `port` (0 for any), print the port, and serve until stdin is closed."""
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
    listener = await loop.create_server(server.create_connection, "127.0.0.1", port, ssl=tls, backlog=1024)
    port = listener.sockets[0].getsockname()[1]
    credentials = {
        "type": "service_account", "project_id": project, "private_key_id": "1", "private_key": _pem(account).decode(),
        "client_email": ACCOUNT, "client_id": "1", "token_uri": f"https://localhost:{port}/token",
    }  # fmt: skip
    (folder / "credentials.json").write_text(json.dumps(credentials))
    sys.stdout.write(json.dumps({"port": port}) + "\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    listener.close()


def main() -> None:
    """Parse the arguments and run the server."""
    parser = argparse.ArgumentParser(prog="python -m timebell_fcm_emulator.server", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--project", default="timebell-test")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--streams", type=int, default=100, help="limit of concurrent streams per connection")
    arguments = parser.parse_args()
    if not re.fullmatch(r"[a-z0-9-]+", arguments.project):
        parser.error("a project name consists of a-z, 0-9 and -")
    import uvloop

    uvloop.run(serve(arguments.folder, arguments.project, arguments.port, arguments.streams))


if __name__ == "__main__":
    main()
