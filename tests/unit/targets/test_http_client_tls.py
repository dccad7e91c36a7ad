"""TLS of the HTTP client: trusted authorities, the negotiated protocol, and streams that continue with TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tls import Authority, served
from tests.unit.targets.sink import Run, sink
from timebell import http_client


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Authority]:
    """A certificate authority that is not trusted yet."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    http_client.tls_context.cache_clear()
    yield Authority(tmp_path)
    http_client.tls_context.cache_clear()


async def over_tls(authority: Authority) -> int:
    async with sink(served(authority.of_loopback())) as server:
        url = f"https://127.0.0.1:{server.port}/status/204"
        return (await http_client.send_request("POST", url, {}, timeout=60, max_bytes=9)).status


def test_certificates_are_verified_against_the_system_or_the_configured_file(
    run: Run, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(http_client.TLSError):
        run(over_tls(authority))
    http_client.tls_context.cache_clear()
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.root))
    assert run(over_tls(authority)) == 204
    assert http_client.tls_context().cert_store_stats()["x509_ca"] == 1
    assert http_client.tls_context().verify_mode is ssl.CERT_REQUIRED
    assert http_client.tls_context().check_hostname
    http_client.tls_context.cache_clear()
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    with pytest.raises(http_client.TLSError, match="CA certificates"):
        run(over_tls(authority))


def test_ca_bundle_is_found_outside_the_openssl_paths(
    run: Run, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_openssl_paths(monkeypatch)
    monkeypatch.setattr(http_client, "CA_BUNDLE_PATHS", ("/nowhere.pem", str(authority.root)))
    assert run(over_tls(authority)) == 204


def test_configured_authorities_replace_those_of_the_system(
    run: Run, authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    _use_openssl_paths(monkeypatch)
    monkeypatch.setattr(http_client, "CA_BUNDLE_PATHS", (str(Authority(other).root),))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.root))
    assert run(over_tls(authority)) == 204

    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setattr(http_client, "CA_BUNDLE_PATHS", (str(authority.root),))
    monkeypatch.setenv("SSL_CERT_DIR", str(other))  # OpenSSL finds only files that are named after their hash
    http_client.tls_context.cache_clear()
    with pytest.raises(http_client.TLSError):
        run(over_tls(authority))


def test_ca_bundle_is_not_used_if_openssl_has_authorities(
    run: Run, authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "0123abcd.0").touch()  # as OpenSSL names certificates
    _use_openssl_paths(monkeypatch, str(tmp_path))
    monkeypatch.setattr(http_client, "CA_BUNDLE_PATHS", (str(authority.root),))
    with pytest.raises(http_client.TLSError):
        run(over_tls(authority))


def test_http_1_is_negotiated(run: Run, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    negotiated: list[str | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        negotiated.append(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async def main() -> int:
        accepting = served(authority.of_loopback())
        accepting.set_alpn_protocols(["h2", "http/1.1"])
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=accepting)
        async with server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            return (await http_client.send_request("GET", url, {}, timeout=60, max_bytes=9)).status

    monkeypatch.setenv("SSL_CERT_FILE", str(authority.root))
    assert run(main()) == 204
    assert negotiated == ["http/1.1"]


def test_an_open_stream_continues_with_tls(run: Run, authority: Authority) -> None:
    async def main(trusted: ssl.SSLContext) -> int:
        async with sink(served(authority.of_loopback())) as server:
            stream = await http_client.Network().connect("127.0.0.1", server.port, 60)
            try:
                await stream.open()
                await stream.start_tls(trusted, "127.0.0.1")
                response = await http_client.exchange(
                    stream, "POST", "/status/204", {"host": "a"}, b"", max_bytes=9, kept_bytes=9
                )
                return response.status
            finally:
                stream.close()

    assert run(main(authority.client())) == 204
    with pytest.raises(http_client.TLSError):
        run(main(ssl.create_default_context()))


def _use_openssl_paths(monkeypatch: pytest.MonkeyPatch, folder: str | None = None) -> None:
    """Let OpenSSL search no file, and no folder or this one."""
    paths = ssl.DefaultVerifyPaths(None, folder, "", "", "", "")
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
