"""The software bill of materials of `timebell[server]`: CycloneDX 1.6 as JSON, from the lock.

`python scripts/sbom.py > sbom.json` (or `make sbom`). What is listed is what requirements/run.txt pins, without what
only the build needs; licences are those that the installed packages declare, where they are installed.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
_PIN = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>[^\s;\\]+)(?: ;[^\\\n]+)?(?P<hashes>(?: ?\\\n    --hash=\S+)*)", re.MULTILINE
)
_NAMES = uuid.UUID("6ba7b812-9dad-11d1-80b4-00c04fd430c8")  # of ISO OIDs (RFC 9562), as any fixed one would do


def canonical(name: str) -> str:
    """A name as the package index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(extra: str = "server") -> dict[str, set[str]]:
    """What `timebell[extra]` needs at run time on this system, by name, and what each of them needs itself.

    Raises PackageNotFoundError for what is not installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    found: dict[str, set[str]] = {"timebell": set()}
    waiting = [("timebell", Requirement(one)) for one in wanted]
    seen: set[tuple[str, str]] = set()
    while waiting:
        parent, one = waiting.pop()
        name = canonical(one.name)
        found[parent].add(name)
        found.setdefault(name, set())
        for chosen in (*one.extras, ""):
            if (name, chosen) in seen:
                continue
            seen.add((name, chosen))
            requires = [Requirement(each) for each in metadata.requires(name) or ()]
            waiting += [
                (name, each) for each in requires if each.marker is None or each.marker.evaluate({"extra": chosen})
            ]
    return found


def sbom() -> dict[str, Any]:
    """The whole document; the same for the same lock, installed packages and version."""
    sys.path.insert(0, str(ROOT))
    from hatch_version import version

    needs = needed()
    pinned = {canonical(pin["name"]): pin for pin in _PIN.finditer((ROOT / "requirements" / "run.txt").read_text())}
    release = version()
    components = [_component(name, pinned[name]) for name in sorted(needs.keys() - {"timebell"})]
    refs = {one["name"]: one["bom-ref"] for one in components} | {"timebell": f"pkg:pypi/timebell@{release}"}
    identity = json.dumps([release, components], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMES, identity)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application", "bom-ref": refs["timebell"], "name": "timebell", "version": release,
                "purl": refs["timebell"], "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[one] for one in needs[name])} for name in sorted(needs)
        ],
    }  # fmt: skip


def _component(name: str, pin: re.Match[str]) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{pin['version']}"
    made: dict[str, Any] = {
        "type": "library", "bom-ref": purl, "name": name, "version": pin["version"], "purl": purl, "scope": "required",
    }  # fmt: skip
    digests = re.findall(r"sha256:([0-9a-f]{64})", pin["hashes"])
    # One hash a file of the release, of which each system takes another: they belong to the places to get it from.
    made["externalReferences"] = [
        {"type": "distribution", "url": f"https://pypi.org/project/{name}/{pin['version']}/",
         "hashes": [{"alg": "SHA-256", "content": digest}]}
        for digest in digests
    ]  # fmt: skip
    about = metadata.metadata(name)
    declared = about.get("License-Expression") or about.get("License")
    if declared and len(declared) < 100:
        made["licenses"] = [{"expression": declared}] if about.get("License-Expression") else [
            {"license": {"name": declared}}
        ]  # fmt: skip
    return made


if __name__ == "__main__":
    print(json.dumps(sbom(), indent=1))
