"""Generate the software bill of materials of `timebell[server]` from the lock file: CycloneDX 1.6 in JSON.

`python scripts/sbom.py > sbom.json` (or `make sbom`). It lists the runtime packages pinned in requirements/run.txt,
with the licenses declared by the installed packages.
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
PIN = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>[^\s;\\]+)(?: ;[^\\\n]+)?(?P<hashes>(?: ?\\\n    --hash=\S+)*)", re.MULTILINE
)
_NAMESPACE = uuid.UUID("6ba7b812-9dad-11d1-80b4-00c04fd430c8")  # the OID namespace of RFC 9562; any fixed value works


def canonical(name: str) -> str:
    """Return the normalized form of a package name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def dependency_graph(extra: str = "server") -> dict[str, set[str]]:
    """Return the runtime dependencies of `timebell[extra]` on this system: package name -> its direct dependencies.

    Raises PackageNotFoundError for a package that is not installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = [*project["dependencies"], *project["optional-dependencies"][extra]]
    graph: dict[str, set[str]] = {"timebell": set()}
    pending = [("timebell", Requirement(line)) for line in direct]
    visited: set[tuple[str, str]] = set()
    while pending:
        parent, requirement = pending.pop()
        name = canonical(requirement.name)
        graph[parent].add(name)
        graph.setdefault(name, set())
        for active_extra in (*requirement.extras, ""):
            if (name, active_extra) in visited:
                continue
            visited.add((name, active_extra))
            requires = [Requirement(each) for each in metadata.requires(name) or ()]
            environment = {"extra": active_extra}
            pending += [(name, each) for each in requires if each.marker is None or each.marker.evaluate(environment)]
    return graph


def sbom() -> dict[str, Any]:
    """Return the document; it is identical for the same lock file, installed packages and version."""
    sys.path.insert(0, str(ROOT))
    from hatch_version import version

    graph = dependency_graph()
    pinned = {canonical(pin["name"]): pin for pin in PIN.finditer((ROOT / "requirements" / "run.txt").read_text())}
    release = version()
    components = [_component(name, pinned[name]) for name in sorted(graph.keys() - {"timebell"})]
    refs = {each["name"]: each["bom-ref"] for each in components} | {"timebell": f"pkg:pypi/timebell@{release}"}
    identity = json.dumps([release, components], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, identity)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application", "bom-ref": refs["timebell"], "name": "timebell", "version": release,
                "purl": refs["timebell"], "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[each] for each in graph[name])} for name in sorted(graph)
        ],
    }  # fmt: skip


def _component(name: str, pin: re.Match[str]) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{pin['version']}"
    component: dict[str, Any] = {
        "type": "library", "bom-ref": purl, "name": name, "version": pin["version"], "purl": purl, "scope": "required",
    }  # fmt: skip
    digests = re.findall(r"sha256:([0-9a-f]{64})", pin["hashes"])
    # The release has one file with its own hash for each platform, so the hashes belong to the distribution references,
    # not to the component.
    component["externalReferences"] = [
        {"type": "distribution", "url": f"https://pypi.org/project/{name}/{pin['version']}/",
         "hashes": [{"alg": "SHA-256", "content": digest}]}
        for digest in digests
    ]  # fmt: skip
    package = metadata.metadata(name)
    declared = package.get("License-Expression") or package.get("License")
    if declared and len(declared) < 100:
        component["licenses"] = [{"expression": declared}] if package.get("License-Expression") else [
            {"license": {"name": declared}}
        ]  # fmt: skip
    return component


if __name__ == "__main__":
    print(json.dumps(sbom(), indent=1))
