"""Print figures about the structure of the source: `python scripts/structure.py [FOLDER]`, by default this checkout.

It counts lines and files below src, the modules with a test file named `test_<module>.py` or `test_<module>_*.py`, the
terms in the glossary's section of private words, and the folders with more than 20 modules.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

MAX_MODULES = 20
PRIVATE_TERMS = "## Terms with a special meaning in Timebell"


def main(root: Path) -> None:
    """Print the figures of the checkout in `root`."""
    files = sorted((root / "src" / "timebell").rglob("*.py"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    print(f"src: {lines:,} lines in {len(files)} files")
    modules = [file.stem for file in files if not file.stem.startswith("__")]
    tests = [file.stem for file in (root / "tests").rglob("test_*.py")]
    tested = sum(any(f"{test}_".startswith(f"test_{module}_") for test in tests) for module in modules)
    print(f"modules with a test file of their name: {tested} of {len(modules)}")
    _, _, section = (root / "docs" / "glossary.md").read_text().partition(PRIVATE_TERMS)
    terms = sum(line.startswith("| **") for line in section.partition("\n## ")[0].splitlines())
    print(f"private terms in the glossary: {terms}")
    for folder, count in sorted(Counter(file.parent for file in files).items()):
        if count > MAX_MODULES:
            print(f"more than {MAX_MODULES} modules: {folder.relative_to(root)} ({count})")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
