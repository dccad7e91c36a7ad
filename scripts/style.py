"""Check the language of the repository: `python scripts/style.py`, part of `make check`.

It prints `path:line: message` for each finding and exits with 1 if there is any. Rules: no words of the old vocabulary
and no requirement ids in code and documentation; docstrings and headings begin with a verb or a noun; subjects of
commits are short; lines of templates have fewer than 120 characters.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = "1c973f7"  # subjects are checked from the commit after this one
MAX_SUBJECT_LENGTH = 72
MAX_TEMPLATE_LINE_LENGTH = 119
CHECKED = (
    *("src", "docs", "packages", "scripts", "benchmarks", "examples", "deploy", "clients/typescript/README.md"),
    *("hatch_build.py", "hatch_metadata.py", "hatch_version.py"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ROADMAP.md"),
)
SUFFIXES = {".py", ".md", ".html", ".js", ".css"}
TEMPLATES = ("src/timebell/dashboard/", "src/timebell/features/")
UNCHECKED = ("src/timebell/dashboard/static/vendor/", "scripts/style.py")
_SPACE = r"[\s#\"]+"  # a phrase may continue in the next line of a comment or string
_PHRASES = (
    *("whoever", "somebody", "nobody", "hearsay", "told", "unheard", "befalls?"),
    *(f"let{_SPACE}go", f"goes{_SPACE}on", f"so{_SPACE}many", f"set{_SPACE}aside"),
)
BANNED = re.compile(
    rf"\b(?:{'|'.join(_PHRASES)})\b"
    r"|(?-i:(?<![A-Za-z0-9])S\d[-_][A-Z]?\d{1,3}(?![A-Za-z0-9]))",  # requirement ids such as S0-53 and S1_F4
    re.IGNORECASE,
)
OPENING = re.compile(r"(?:What|Who|Whoever|Those|As)\b")
HEADING = re.compile(r"^##+ (What|Who|Whoever|Those|As)\b", re.MULTILINE)  # one # may be a comment in a code block
_TORTURE = "packages/timebell-torture/src/timebell_torture"
# Legitimate uses of banned phrases: (file, phrase).
ALLOWED = {
    *((f"{_TORTURE}/{name}.py", "nobody") for name in ("mariadb", "pgbouncer", "postgres")),  # the Unix user
}


def findings(root: Path, base: str = BASE) -> Iterator[str]:
    """Yield each finding below `root`, and in the commits after `base`."""
    for path in _files(root):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        yield from _banned_phrases(name, text)
        if path.suffix == ".py":
            yield from _docstring_openings(name, text)
        if path.suffix == ".md":
            yield from _heading_openings(name, text)
        if path.suffix == ".html" and name.startswith(TEMPLATES):
            yield from _long_lines(name, text)
    yield from _commit_subjects(root, base)


def _files(root: Path) -> Iterator[Path]:
    for checked in CHECKED:
        path = root / checked
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            is_unchecked = file.relative_to(root).as_posix().startswith(UNCHECKED)
            if file.suffix in SUFFIXES and file.is_file() and not is_unchecked:
                yield file


def _banned_phrases(name: str, text: str) -> Iterator[str]:
    for match in BANNED.finditer(text):
        phrase = " ".join(re.findall(r"[^\s#\"]+", match[0].lower()))
        line = text.count("\n", 0, match.start()) + 1
        if (name, phrase) not in ALLOWED:
            yield f"{name}:{line}: avoid “{phrase}”"


def _docstring_openings(name: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            docstring = ast.get_docstring(node)
            if docstring is not None and (match := OPENING.match(docstring)):
                yield f"{name}:{node.body[0].lineno}: a docstring begins with “{match[0]}”, not with a verb or a noun"


def _heading_openings(name: str, text: str) -> Iterator[str]:
    for match in HEADING.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield f"{name}:{line}: a heading begins with “{match[1]}”, not with a verb or a noun"


def _long_lines(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_TEMPLATE_LINE_LENGTH:
            yield f"{name}:{number}: the line has {len(line)} characters, more than {MAX_TEMPLATE_LINE_LENGTH}"


def _commit_subjects(root: Path, base: str) -> Iterator[str]:
    log = _git(root, "log", "--no-merges", "--format=%h %s", f"{base}..HEAD")
    if log is None:
        print(f"style: commit subjects are not checked: no git repository that contains {base}", file=sys.stderr)
        return
    for line in log.splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > MAX_SUBJECT_LENGTH:
            yield f"commit {commit}:1: the subject has {len(subject)} characters, more than {MAX_SUBJECT_LENGTH}"
        if subject.endswith("."):
            yield f"commit {commit}:1: the subject ends with a full stop"


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if git, the repository or the base commit is missing."""
    try:
        run = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout


def main() -> int:
    """Print all findings; return the exit status."""
    found = list(findings(ROOT))
    print("\n".join(found) if found else "style: no findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
