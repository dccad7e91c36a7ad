"""Check that every runtime package of the lock file declares a permissive license.

`python -m scripts.licenses` (a part of `make check`) exits with 1 and lists the others. MPL-2.0 is accepted, because
its conditions apply only to changed files of such a package.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from scripts.sbom import PIN, ROOT

ACCEPTED = frozenset({
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0",
})  # fmt: skip
# Trove classifiers of packages that declare no SPDX expression (PEP 639).
CLASSIFIERS = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
}


def declared_license(name: str) -> str:
    """Return the SPDX expression of an installed package, or an empty text if it declares none that is known.

    Raises PackageNotFoundError.
    """
    package = metadata.metadata(name)
    expression: str = package.get("License-Expression") or package.get("License") or ""
    if package.get("License-Expression") or expression in ACCEPTED:
        return expression
    classifiers = [line for line in package.get_all("Classifier") or () if line.startswith("License ::")]
    known = [CLASSIFIERS[line] for line in classifiers if line in CLASSIFIERS]
    return " AND ".join(known) if len(known) == len(classifiers) else ""


def is_accepted(expression: str) -> bool:
    """Return whether an SPDX expression can be met with accepted licenses alone."""
    tokens = re.findall(r"[()]|[\w.+-]+", expression)
    if not tokens:
        return False
    python = {"AND": "and", "OR": "or", "(": "(", ")": ")"}
    words = [python.get(token, str(token in ACCEPTED)) for token in tokens]
    return bool(eval(" ".join(words)))  # only the words and, or, True, False and parentheses


def find_refused(lock: Path) -> list[str]:
    """Return a line for each installed package of a lock file whose license is not accepted.

    Packages for other systems are not installed and not checked.
    """
    installed = {re.sub(r"[-_.]+", "-", each.name).lower() for each in metadata.distributions()}
    names = sorted({pin["name"] for pin in PIN.finditer(lock.read_text())} & installed)
    licenses = {name: declared_license(name) for name in names}
    return [f"{name}: {licenses[name] or 'none declared'}" for name in names if not is_accepted(licenses[name])]


if __name__ == "__main__":
    refused = find_refused(ROOT / "requirements" / "run.txt")
    print("licenses: all accepted" if not refused else "licenses not accepted:\n" + "\n".join(refused))
    sys.exit(bool(refused))
