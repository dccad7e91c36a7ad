"""Each guard of the webhook target is taken away once, and the tests beside this file have to notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent.relative_to(ROOT)
NETWORK = ("test_ssrf.py", "test_address.py", "test_http_network.py")
HOSTILE = ("test_http_hostile.py", "test_http.py", "test_http_options.py")
MUTANTS = [  # what is gone, the file, its text, the text instead, the tests that are asked
    ("every answer counts", "address", "if read and all(\n", "if read and any(\n", NETWORK),
    ("the table", "address", "and not any(inner in network for network in REFUSED)", "", NETWORK),
    ("2000::/3", "address", "(inner.version == 4 or inner in GLOBAL_V6)", "True", NETWORK),
    ("IPv4-mapped", "address", "if address.ipv4_mapped is not None:", "if False:", NETWORK),
    ("NAT64", "address", "if address in NAT64:", "if False:", NETWORK),
    ("6to4", "address", '"2002::/16", ', "", NETWORK),
    ("Teredo", "address", '"2001::/23", ', "", NETWORK),
    ("carrier-grade NAT", "address", '*("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10",',
     '*("0.0.0.0/8", "10.0.0.0/8",', NETWORK),
    ("metadata", "address", "any(inner in network for network in METADATA)", "False", NETWORK),
    ("zone ids", "address", 'getattr(address, "scope_id", None) or ', "", NETWORK),
    ("own addresses", "address", "return public and not _is_own(inner)", "return public", NETWORK),
    ("own listeners, when sending", "address", " and not _meets(each, ours) for", " for", NETWORK),
    ("own listeners, when making", "address", "if literal is not None and _meets(", "if False and _meets(", NETWORK),
    ("wildcards listen everywhere", "address", "address.is_loopback or address.is_unspecified",
     "address.is_loopback", NETWORK),
    ("literals when a job is made", "address", "if local or (literal", "if local and (literal", NETWORK),
    ("names of this machine", "address", "if local or (literal", "if (literal", NETWORK),
    ("numbers as hosts", "address", "if _NUMBER.fullmatch(labels[-1]):", "if False:", NETWORK),
    ("the whole URL is read", "address", "match = _URL.fullmatch(url)", "match = _URL.match(url)", NETWORK),
    ("ASCII only", "address", "re.IGNORECASE | re.ASCII,\n)\n_NETWORK", "re.IGNORECASE,\n)\n_NETWORK", NETWORK),
    ("low ports", "address", " or (place.port < 1024 and place.port not in (80, 443))", "", NETWORK),
    ("ports of databases", "address", "place.port in DENIED_PORTS or ", "", NETWORK),
    ("https only", "address", 'if place.scheme == "https" or self._allow_http:', "if True:", NETWORK),
    ("http only where allowed", "address", "else self._opened(address)", "else True", NETWORK),
    ("allowed networks are private", "address", "if not any(network.version == each.version and",
     "if not any(True or", NETWORK),
    ("one text for unknown and private", "address", "{place.host} has no address", "{found} has no address", NETWORK),
    ("the checked address is dialled", "http", "self._dialled(address, place.port",
     "self._dialled(place.host, place.port", NETWORK),
    ("the peer is compared", "http",
     "stream.peer is not None and ipaddress.ip_address(stream.peer) == ipaddress.ip_address(address)", "True", NETWORK),
    ("the URL is read again when it is sent", "http", "            options = self.check(options)\n", "", HOSTILE),
    ("headers of the protocol", "http", " and not _OWN_HEADERS.fullmatch(name)", "", HOSTILE),
    ("values of headers", "http", "_HEADER_VALUE.fullmatch(value)", "value", HOSTILE),
    ("an answer's length", "http", "BODY_BYTES = 64 * 1024", "BODY_BYTES = 64 * 1024 * 1024", HOSTILE),
    ("the headers' length", "../wire", "HEAD_BYTES = 16 * 1024\n", "HEAD_BYTES = 16 * 1024 * 1024\n", HOSTILE),
    ("what is kept", "../wire", "part.data[: kept - len(found)]", "part.data", HOSTILE),
    ("the deadline", "http", "async with asyncio.timeout(self._timeout):", "async with asyncio.timeout(20):", HOSTILE),
    ("a failure takes its time", "http", "                await asyncio.Event().wait()\n",
     "                raise TimeoutError\n", HOSTILE),
    ("a connection is closed whatever happens", "http", "        finally:\n            stream.close()\n",
     "        finally:\n            pass\n", HOSTILE),
    ("nothing is compressed", "http", '"accept-encoding": "identity",', "", HOSTILE),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("module", "old", "new", "asked"), [each[1:] for each in MUTANTS], ids=[e[0] for e in MUTANTS])
def test_a_guard_that_is_gone_is_missed(
    tmp_path: Path, module: str, old: str, new: str, asked: tuple[str, ...]
) -> None:
    shutil.copytree(ROOT / "src" / "timebell", tmp_path / "timebell")
    path = tmp_path / "timebell" / "targets" / f"{module}.py"
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not uvloop and not fifty",
         *(str(HERE / name) for name in asked)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:]
    assert "failed" in done.stdout.splitlines()[-1]
