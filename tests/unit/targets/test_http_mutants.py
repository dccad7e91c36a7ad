"""Remove each guard of the webhook target once; the tests in this folder must fail."""

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
    ("https only", "address", 'if endpoint.scheme == "https" or self._allow_http:', "if True:", NETWORK),
    ("http only where allowed", "address", "else self._is_allowed_by_operator(address)", "else True", NETWORK),
    ("allowed networks are private", "address", "if not any(network.version == private.version and",
     "if not any(True or", NETWORK),
    ("one text for unknown and private", "address", "{endpoint.host} has no address", "{hosts} has no address",
     NETWORK),
    ("the checked address is dialed", "http", "address, endpoint.port, CONNECT_SECONDS",
     "endpoint.host, endpoint.port, CONNECT_SECONDS", NETWORK),
    ("the peer is compared", "http",
     "stream.peer_address is not None and ipaddress.ip_address(stream.peer_address) == ipaddress.ip_address(\n"
     "            address\n        )", "True", NETWORK),
    ("the URL is checked again on delivery", "http", "            options = self.check(options)\n", "", HOSTILE),
    ("headers of the protocol", "http", " and not _RESERVED_HEADERS.fullmatch(name)", "", HOSTILE),
    ("values of headers", "http", "_HEADER_VALUE.fullmatch(value)", "value", HOSTILE),
    ("the response length", "http", "MAX_RESPONSE_BYTES = 64 * 1024", "MAX_RESPONSE_BYTES = 64 * 1024 * 1024", HOSTILE),
    ("the header length", "../http_client", "MAX_HEAD_BYTES = 16 * 1024\n",
     "MAX_HEAD_BYTES = 16 * 1024 * 1024\n", HOSTILE),
    ("the stored part of a body", "../http_client", "body[: self._kept_bytes - len(self.body)]", "body", HOSTILE),
    ("the deadline", "http", "async with asyncio.timeout(self._timeout):", "async with asyncio.timeout(20):", HOSTILE),
    ("a failure takes its time", "http", "                await asyncio.Event().wait()\n",
     "                raise TimeoutError\n", HOSTILE),
    ("a connection is closed whatever happens", "http",
     "                self._idle_connections.put(key, stream)\n            else:\n                stream.close()\n",
     "                self._idle_connections.put(key, stream)\n", HOSTILE),
    ("the tenant of a connection", "idle_connections", "cls(tenant_id, endpoint", 'cls("", endpoint', IDLE),
    ("the address of a connection", "idle_connections", "endpoint.port, address)", 'endpoint.port, "")', IDLE),
    ("nothing is compressed", "http", '"accept-encoding": "identity",', "", HOSTILE),
]  # fmt: skip


@pytest.mark.slow
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
