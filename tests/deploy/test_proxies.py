"""The steps of docs/guides/production.md with real proxies: roles, TLS, single sign-on, addresses, events, imports.

The texts of the guide are used as they are, apart from ports, paths and passwords. SQL replaces `createuser` and
`createdb`, which the package with the server does not contain.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest
from playwright.sync_api import expect

from tests.debian_packages import install
from tests.docs.pages import DOCS, blocks
from tests.rotation import rotated
from tests.servers import Postgres, free_port
from tests.tls import Authority
from tests.ui import chromium as browsers
from tests.ui.test_provider_in_chromium import running_provider, sign_in_at_provider
from tests.unit.cli.process import Process, until

HOST, CLIENT_ADDRESS = "timebell.example.com", "127.0.0.9"
PAGE = DOCS / "guides" / "production.md"
GUIDE = {block.info: block.text for block in blocks(PAGE)}
NGINX = """
daemon off;
user root;
pid {folder}/nginx.pid;
error_log {folder}/proxy.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
{server}
}}
"""


def nginx_command(folder: Path, port: int, node_port: int) -> list[str]:
    """Write the configuration of nginx; return its command."""
    server = GUIDE["/etc/nginx/conf.d/timebell.conf"].replace("listen 443", f"listen 127.0.0.1:{port}")
    server = server.replace("listen 80;", f"listen 127.0.0.1:{free_port()};")
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, server=_with_paths(server, folder, node_port)))
    return ["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "proxy.log")]


def caddy_command(folder: Path, port: int, node_port: int) -> list[str]:
    """Write the configuration of Caddy; return its command."""
    server = GUIDE["/etc/caddy/Caddyfile"].replace(f"{HOST} {{", f"{HOST}:{port} {{")
    options = "{\n\tadmin off\n\tauto_https disable_redirects\n}\n"
    (folder / "Caddyfile").write_text(options + _with_paths(server, folder, node_port))
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


def _with_paths(text: str, folder: Path, node_port: int) -> str:
    certificate = str(folder / f"{HOST}.pem")
    for path in ("/etc/ssl/timebell/certificate.pem", "/etc/ssl/timebell/key.pem"):
        assert path in text
        text = text.replace(path, certificate)
    assert "127.0.0.1:8700" in text
    return text.replace("127.0.0.1:8700", f"127.0.0.1:{node_port}")


@contextmanager
def running_proxy(package: str, folder: Path, port: int, node_port: int) -> Iterator[None]:
    if shutil.which(package.removesuffix("-light")) is None:
        install(package)
    command = (caddy_command if package == "caddy" else nginx_command)(folder, port, node_port)
    with open(folder / "proxy.out", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)})
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def database() -> Iterator[Postgres]:
    """A server of its own, because roles belong to a server."""
    server = Postgres()
    yield server
    server.close()


@pytest.mark.parametrize("package", rotated(["nginx-light", "caddy"], ["nginx-light"]))
def test_the_guide_leads_to_single_sign_on_behind_a_proxy(package: str, tmp_path: Path, database: Postgres) -> None:
    browsers.install_assets()
    _create_tables_and_role(database, tmp_path)
    authority = Authority(tmp_path)
    authority.certificate(HOST)
    port, node_port, provider_port = free_port(), free_port(), free_port()
    url, issuer = f"https://{HOST}:{port}", f"http://localhost:{provider_port}"
    secret_files = {"/etc/timebell/secret-key": "x" * 32, "/etc/timebell/oidc-secret": "s3cret & more: +%"}
    for path, secret in secret_files.items():
        (tmp_path / Path(path).name).write_text(secret)
    environment = dict(line.split("=", 1) for line in shlex.split(GUIDE["/etc/timebell/environment"]))
    environment |= {name: str(tmp_path / Path(value).name) for name, value in environment.items()
                    if value in secret_files}  # fmt: skip
    environment |= {
        "TIMEBELL_DATABASE_URL": _at(database, environment["TIMEBELL_DATABASE_URL"]),
        "TIMEBELL_HTTP_PORT": str(node_port), "TIMEBELL_METRICS_PORT": str(free_port()), "TIMEBELL_URL": url,
        "TIMEBELL_OIDC_ISSUER": issuer, "TIMEBELL_APP": str(_write_app(tmp_path, environment["TIMEBELL_APP"])),
    }  # fmt: skip
    secret = secret_files["/etc/timebell/oidc-secret"]
    with (
        running_provider(tmp_path, issuer, provider_port, url, secret),
        running_proxy(package, tmp_path, port, node_port),
    ):
        assert f"register {url}/ui/sign-in/callback" in _timebell(tmp_path, environment, "doctor")
        node = Process(tmp_path, ["run"], environment)
        try:
            client = authority.client()
            until(lambda: _is_ready(client, port) or None, node.err.read_text)
            _sign_in_with_chromium(url)
            key = _timebell(tmp_path, environment, "key", "create", "emergency", "--role", "platform").strip()
            _check_addresses(client, port, key)
            job = {"topic": "a.b", "runAt": "2099-01-01T00:00:00Z"}
            lines = [json.dumps({**job, "payload": [number, "x" * 300]}) for number in range(5000)]
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/x-ndjson"}
            status, body = _request(client, port, "POST", "/api/v1/jobs/bulk", "\n".join(lines).encode(), headers)
            assert (status, json.loads(body)["progress"]["done"]) == (201, 5000)
            assert _request(client, port, "GET", "/metrics")[0] == 404
        finally:
            node.kill()


def _create_tables_and_role(database: Postgres, folder: Path) -> None:
    """Create the tables as their owner, and the role of the node, with the commands of the guide."""
    (text,) = [block.text for block in blocks(PAGE) if "db roles" in block.text and block.language == "sh"]
    owner, name = re.search(r"createuser .* (\w+)\n.*createdb --owner \w+ (\w+)\n", text).groups()  # type: ignore[union-attr]
    asyncio.run(_execute(database.url, f"CREATE ROLE {owner} LOGIN CREATEROLE"))
    asyncio.run(_execute(database.url, f"CREATE DATABASE {name} OWNER {owner}"))
    url = _at(database, text.partition("TIMEBELL_DATABASE_URL=")[2].partition("\n")[0])
    _timebell(folder, {"TIMEBELL_DATABASE_URL": url}, "db", "upgrade")
    asyncio.run(_execute(url, _timebell(folder, {"TIMEBELL_DATABASE_URL": url}, "db", "roles")))


def _write_app(folder: Path, path: str) -> Path:
    """Write an app under the file name of `path`."""
    app = folder / Path(path).name
    app.write_text("from timebell import Timebell\n\napp = Timebell()\n")
    return app


def _at(database: Postgres, url: str) -> str:
    """Return a URL of the guide with the address of the server, which accepts any password."""
    assert "@localhost/" in url
    return url.replace("@localhost/", f"@127.0.0.1:{database.port}/")


async def _execute(url: str, statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statements)
    finally:
        await connection.close()


def _timebell(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    """Run the command line; return its output, also of a `doctor` that has remarks."""
    command = [sys.executable, "-m", "timebell.cli.main", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 or "doctor" in arguments, done.stdout + done.stderr
    return done.stdout


def _sign_in_with_chromium(url: str) -> None:
    with browsers.chromium(f"--host-resolver-rules=MAP {HOST} 127.0.0.1") as chromium:
        context = chromium.new_context(ignore_https_errors=True)
        context.set_default_timeout(1000 * browsers.TIMEOUT_SECONDS)
        page = context.new_page()
        page.goto(url)
        page.get_by_role("link", name="Sign in at localhost").click()
        sign_in_at_provider(page, "dana")
        expect(page.get_by_role("link", name="dana@example.com, admin")).to_be_visible()
        expect(page.locator("[data-live]")).to_have_text("Live")  # events arrive through the proxy
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("button", name="Yes, sign me out").click()
        page.wait_for_url(f"{url}/ui/sign-in*")


def _check_addresses(client: ssl.SSLContext, port: int, key: str) -> None:
    """Assert that the audit log names the client, whatever headers it sends."""
    for name, value in (("X-Forwarded-For", "203.0.113.9"), ("Forwarded", "for=203.0.113.9"), ("X-Other", "1")):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", name: value}
        body = json.dumps({"name": name, "role": "viewer"}).encode()
        assert _request(client, port, "POST", "/api/v1/keys", body, headers)[0] == 201
    headers = {"Authorization": f"Bearer {key}"}
    records = json.loads(_request(client, port, "GET", "/api/v1/audit-log?actor=emergency", b"", headers)[1])["items"]
    assert [record["address"] for record in records] == [CLIENT_ADDRESS] * 3


def _is_ready(client: ssl.SSLContext, port: int) -> bool:
    try:
        return _request(client, port, "GET", "/readyz")[0] == 200
    except OSError:
        return False


def _request(
    client: ssl.SSLContext, port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Send a request from CLIENT_ADDRESS, so that the proxy has another address than its client."""
    connection = _Connection(port, client)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class _Connection(http.client.HTTPSConnection):
    """A connection to the proxy under its public name, without name resolution."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(HOST, port, context=context, timeout=60)
        self._tls = context

    def connect(self) -> None:
        raw = socket.create_connection(("127.0.0.1", self.port), 60, (CLIENT_ADDRESS, 0))
        self.sock = self._tls.wrap_socket(raw, server_hostname=HOST)
