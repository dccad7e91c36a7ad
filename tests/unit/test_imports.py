"""No file of `timebell` imports itself through other files, not even from within a function."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from scripts.architecture import find_cycle, import_graph


def test_files_do_not_import_each_other_in_a_circle() -> None:
    graph = import_graph()
    assert len(graph) > 400
    cycle = find_cycle(graph)
    assert cycle is None, "\n".join(
        f"{module} imports {imported} in line {graph[module][imported]}" for module, imported in pairwise(cycle)
    )


def test_imports_in_functions_count_and_those_for_type_checkers_do_not(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    files = {
        "__init__": "",
        "first": "from package import second\n",
        "second": "def function():\n    from . import third\n",
        "third": "from .first import name\n",
        "fourth": (
            "from typing import TYPE_CHECKING\nimport package.first\nif TYPE_CHECKING:\n    import package.fifth\n"
        ),
        "fifth": "import package.fourth\n",
    }
    for name, text in files.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    graph = import_graph(tmp_path)
    assert graph["package.second"] == {"package.third": 2}
    assert graph["package.fourth"] == {"package.first": 2}
    assert find_cycle(graph) == ["package.first", "package.second", "package.third", "package.first"]
    (tmp_path / "package" / "second.py").write_text("")
    assert find_cycle(import_graph(tmp_path)) is None
