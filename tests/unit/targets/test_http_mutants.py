"""Remove each guard of the HTTP target once; the tests in this folder must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent.relative_to(ROOT)
NETWORK = ("test_address_ssrf.py", "test_address.py", "test_http_network.py")
IDLE = ("test_idle_connections.py",)
CHANNELS = ("test_http_channels.py",)
AUTHENTICATION = ("test_http_authentication.py",)
REQUESTS = ("test_http_requests.py",)
HOSTILE = ("test_http_hostile.py", "test_http.py", "test_http_options.py")
MUTANTS = [  # the removed guard, the module, its text, the replacement, the tests that must fail
    ("every answer counts", "address", "if addresses and all(\n", "if addresses and any(\n", NETWORK),
    ("the table", "address",
     " and not any(\n            inner in network for network in REFUSED_NETWORKS\n        )", "", NETWORK),
    ("2000::/3", "address", "(inner.version == 4 or inner in GLOBAL_IPV6_NETWORK)", "True", NETWORK),
    ("IPv4-mapped", "address", "if address.ipv4_mapped is not None:", "if False:", NETWORK),
    ("NAT64", "address", "if address in NAT64_NETWORK:", "if False:", NETWORK),
    ("6to4", "address", '"2002::/16", ', "", NETWORK),
    ("Teredo", "address", '"2001::/23", ', "", NETWORK),
    ("carrier-grade NAT", "address", '*("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10",',
     '*("0.0.0.0/8", "10.0.0.0/8",', NETWORK),
    ("metadata", "address", "any(inner in network for network in METADATA_NETWORKS)", "False", NETWORK),
    ("zone ids", "address", 'getattr(address, "scope_id", None) or ', "", NETWORK),
    ("own addresses", "address", "return public and not _is_own_address(inner)", "return public", NETWORK),
    ("own listeners on delivery", "address",
     "                and not _matches_listener(address, listener_addresses)\n", "", NETWORK),
    ("own listeners on creation", "address", "if literal is not None and _matches_listener(",
     "if False and _matches_listener(", NETWORK),
    ("wildcards listen everywhere", "address", "address.is_loopback or address.is_unspecified",
     "address.is_loopback", NETWORK),
    ("literals on creation", "address", "if is_local_name or (literal", "if is_local_name and (literal",
     NETWORK),
    ("names of this machine", "address", "if is_local_name or (literal", "if (literal", NETWORK),
    ("numbers as hosts", "address", "if _NUMBER.fullmatch(labels[-1]):", "if False:", NETWORK),
    ("the whole URL is read", "address", "match = _URL.fullmatch(url)", "match = _URL.match(url)", NETWORK),
    ("ASCII only", "address", "re.IGNORECASE | re.ASCII,\n)\n_NETWORK", "re.IGNORECASE,\n)\n_NETWORK", NETWORK),
    ("low ports", "address", " or (endpoint.port < 1024 and endpoint.port not in (80, 443))", "", NETWORK),
    ("ports of databases", "address", "endpoint.port in DENIED_PORTS or ", "", NETWORK),
    ("https only", "address", 'if endpoint.scheme in ("https", PROXY_SCHEME) or self._allow_http:', "if True:",
     NETWORK),
    ("http only where allowed", "address", "else self._is_allowed_by_operator(address)", "else True", NETWORK),
    ("allowed networks are private", "address", "if not any(network.version == private.version and",
     "if not any(True or", NETWORK),
    ("one text for unknown and private", "address", "{endpoint.host} has no address", "{hosts} has no address",
     NETWORK),
    ("the checked address is dialed", "http_connections", "address, endpoint.port, CONNECT_SECONDS",
     "endpoint.host, endpoint.port, CONNECT_SECONDS", NETWORK),
    ("the peer is compared", "http_connections",
     "stream.peer_address is not None and ipaddress.ip_address(stream.peer_address) == ipaddress.ip_address(\n"
     "            address\n        )", "True", NETWORK),
    ("the URL is checked again on delivery", "http", "            options = self.check(options)\n", "", HOSTILE),
    ("headers of the protocol", "http_options", " and not _RESERVED_HEADERS.fullmatch(name)", "", HOSTILE),
    ("values of headers", "http_options", "_HEADER_VALUE.fullmatch(value)", "value", HOSTILE),
    ("the response length", "http_connections", "MAX_RESPONSE_BYTES = 64 * 1024",
     "MAX_RESPONSE_BYTES = 64 * 1024 * 1024", HOSTILE),
    ("the header length", "../http_client", "MAX_HEAD_BYTES = 16 * 1024\n",
     "MAX_HEAD_BYTES = 16 * 1024 * 1024\n", HOSTILE),
    ("the stored part of a body", "../http_client", "body[: self._kept_bytes - len(self.body)]", "body", HOSTILE),
    ("the deadline", "http", "async with asyncio.timeout(timeout):", "async with asyncio.timeout(20):", HOSTILE),
    ("a failure takes its time", "http_connections", "                await asyncio.Event().wait()\n",
     "                raise TimeoutError\n", HOSTILE),
    ("a connection is closed whatever happens", "http_connections",
     "                self._idle_connections.put(key, stream)\n            else:\n                stream.close()\n",
     "                self._idle_connections.put(key, stream)\n", HOSTILE),
    ("the tenant of a connection", "idle_connections", "cls(tenant_id, endpoint", 'cls("", endpoint', IDLE),
    ("the address of a connection", "idle_connections", "endpoint.port, address, channel)",
     'endpoint.port, "", channel)', IDLE),
    ("the channel of a connection", "idle_connections", "endpoint.port, address, channel)",
     "endpoint.port, address, None)", CHANNELS),
    ("the address of a proxy", "http_connections", "(await self.guard.resolve(proxy.endpoint))",
     "[proxy.endpoint.host]", CHANNELS),
    ("a proxy gets the checked address", "http_connections", 'f"{destination}:{key.port}"',
     'f"{key.host}:{key.port}"', CHANNELS),
    ("the URL of a proxy", "address", "return self._check_endpoint(replace(endpoint, scheme=PROXY_SCHEME))",
     "return replace(endpoint, scheme=PROXY_SCHEME)", CHANNELS),
    ("the key on disk is encrypted", "client_tls", "serialization.BestAvailableEncryption(password)",
     "serialization.NoEncryption()", CHANNELS),
    ("the client certificate of a token request", "http_authentication", "channel.without_certificate()", "channel",
     CHANNELS),
    ("the tenant of a token", "http_authentication", "[tenant_id, auth]", '["", auth]', AUTHENTICATION),
    ("the URL of a token endpoint", "http_authentication", 'guard.check_url(auth["tokenUrl"])', "pass",
     AUTHENTICATION),
    ("issued tokens are masked", "http", "request.secrets.add(authorization.secret)", "pass", AUTHENTICATION),
    ("one request for a token", "http_authentication", "async with cached.lock:", "if True:", AUTHENTICATION),
    ("the URL of a redirect", "http",
     'self._guard.check_url(urljoin(old.url, location.partition("#")[0]))',
     '__import__("timebell.targets.address", fromlist="x")._parse(urljoin(old.url, location))', REQUESTS),
    ("credentials stay at their origin", "http", "if name in PUBLIC_HEADERS", "if True", REQUESTS),
    ("a body stays at its origin", "http", "            if request.body:\n                return False\n", "",
     REQUESTS),
    ("nothing is compressed", "http", '"accept-encoding": "identity",', "", HOSTILE),
]  # fmt: skip


@pytest.mark.soak  # each runs files of tests
@pytest.mark.parametrize(
    ("module", "old", "new", "test_files"), [each[1:] for each in MUTANTS], ids=[e[0] for e in MUTANTS]
)
def test_removed_guard_is_detected(
    tmp_path: Path, module: str, old: str, new: str, test_files: tuple[str, ...]
) -> None:
    shutil.copytree(ROOT / "src" / "timebell", tmp_path / "timebell")
    path = tmp_path / "timebell" / "targets" / f"{module}.py"
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not uvloop and not fifty",
         *(str(HERE / name) for name in test_files)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:]
    assert "failed" in done.stdout.splitlines()[-1]
