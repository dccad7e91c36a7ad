"""The generated part of the architecture page matches the code."""

from __future__ import annotations

from scripts import architecture


def test_architecture_page_is_up_to_date() -> None:
    page = architecture.PAGE.read_text()
    assert architecture.updated_page(page) == page, "run: python scripts/architecture.py"


def test_imports_of_packages_omit_those_reached_through_another() -> None:
    imports = architecture.package_imports()
    assert set(imports) == {package for layer in architecture.layers() for package in layer}
    assert "store" in imports["observe"]
    assert "store" not in imports["engine"]
