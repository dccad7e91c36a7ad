"""Templates are formatted for readers, and all of them compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from timebell.dashboard.rendering import PACKAGE_DIR, template_environment
from timebell.features import FEATURES

TEMPLATES = PACKAGE_DIR.parent


@pytest.mark.parametrize("path", sorted(TEMPLATES.rglob("*.html")), ids=lambda path: str(path.relative_to(TEMPLATES)))
def test_template_lines_are_indented_by_two_spaces(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        indentation = len(line) - len(line.lstrip(" "))
        assert not indentation % 2, f"{path}:{number} is indented by {indentation} spaces"
        assert "\t" not in line, f"{path}:{number} contains a tab"
        assert line == line.rstrip(), f"{path}:{number} ends with spaces"


def test_rendered_pages_contain_no_indentation_of_templates() -> None:
    template = template_environment(FEATURES).from_string("<ul>\n  <li>\n    {{ text }}\n  </li>\n</ul>")
    assert template.render(text="  kept") == "<ul>\n<li>\n  kept\n</li>\n</ul>"
