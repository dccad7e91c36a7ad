"""The links of the package: its project URLs, and those of the README, which are relative in the repository.

A release is built with TIMEBELL_PROJECT_URL, the address of the repository's page. A wheel that is built from an sdist
has the links of the sdist. Without either, there are none, and those of the README stay relative.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {"Homepage": "", "Documentation": "/blob/main/docs/README.md", "Changelog": "/blob/main/CHANGELOG.md",
         "Repository": "", "Issues": "/issues"}  # fmt: skip


class ProjectLinks(MetadataHookInterface):
    """Set `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        url = find_project_url(root)
        metadata["urls"] = {} if url is None else {name: f"{url}{path}" for name, path in PAGES.items()}
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, url)}


def find_project_url(root: Path) -> str | None:
    """Return the address of the repository's page, or None."""
    if url := os.environ.get("TIMEBELL_PROJECT_URL"):
        return url.rstrip("/")
    package_info = root / "PKG-INFO"
    text = package_info.read_text(encoding="utf-8") if package_info.is_file() else ""
    found = re.search(r"^Project-URL: Repository, (\S+)$", text, re.MULTILINE)
    return None if found is None else found[1]


def absolute_links(text: str, url: str | None) -> str:
    """Return Markdown whose links to files of the repository lead to its page, and images to the files themselves."""
    if url is None:
        return text
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)([^)\s]+)\)", rf"\1{url}/raw/main/\2)", text)
    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", rf"]({url}/blob/main/\1)", text)
