"""Each rule of scripts/style.py finds a bad sample, and accepts a good one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import style

TEMPLATE = f"{style.TEMPLATES[0]}page.html"


def findings(root: Path, base: str = style.BASE) -> list[str]:
    return list(style.findings(root, base))


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("src/a.py", "x = 1  # Whoever asks\n", "src/a.py:1: avoid “whoever”"),
        ("src/a.py", "# it is let\n# go\n", "src/a.py:1: avoid “let go”"),
        ("src/a.py", 'x = ("so "\n     "many")\n', "src/a.py:1: avoid “so many”"),
        ("docs/a.md", "\nIt goes on.\n", "docs/a.md:2: avoid “goes on”"),
        ("docs/a.md", "What befalls it\n", "docs/a.md:1: avoid “befalls”"),
        ("packages/a/b.py", "# S1_F4\n", "packages/a/b.py:1: avoid “s1_f4”"),
        ("docs/a.md", "\n## What is tested\n", "docs/a.md:2: a heading begins with “What”, not with a verb or a noun"),
        ("README.md", "See S0-53.\n", "README.md:1: avoid “s0-53”"),
        (TEMPLATE, "<p>Set aside</p>\n", f"{TEMPLATE}:1: avoid “set aside”"),
        (TEMPLATE, f"\n{'x' * 120}\n", f"{TEMPLATE}:2: the line has 120 characters, more than 119"),
        (
            "src/a.py",
            'def f():\n    """What is late."""\n',
            "src/a.py:2: a docstring begins with “What”, not with a verb or a noun",
        ),
        ("src/a.py", '"""As in B."""\n', "src/a.py:1: a docstring begins with “As”, not with a verb or a noun"),
    ],
)
def test_finds_a_bad_sample(tmp_path: Path, name: str, text: str, finding: str) -> None:
    write(tmp_path, name, text)
    assert findings(tmp_path) == [finding]


def test_accepts_a_good_sample(tmp_path: Path) -> None:
    write(tmp_path, "src/a.py", '"""Assign jobs to S3 and S-3."""\nTOLD_AT = "untold"\n')
    write(tmp_path, TEMPLATE, f"{'x' * 119}\n")
    write(tmp_path, f"{style.UNCHECKED[0]}a.js", "nobody")
    assert findings(tmp_path) == []


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_finds_bad_subjects_of_later_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tmp_path, "init", "-q")
    subjects = ["Not checked, as it is the base.", "Add a rule", "Add a rule.", "x" * 73]
    commits = []
    for subject in subjects:
        git(tmp_path, "commit", "--allow-empty", "-m", subject)
        commits.append(git(tmp_path, "rev-parse", "--short", "HEAD"))
    assert sorted(findings(tmp_path, commits[0])) == sorted(
        [
            f"commit {commits[2]}:1: the subject ends with a full stop",
            f"commit {commits[3]}:1: the subject has 73 characters, more than 72",
        ]
    )
    assert findings(tmp_path, "0000000") == []
    assert "not checked" in capsys.readouterr().err


def test_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    assert style.main() == 0
    write(tmp_path, "README.md", "somebody\n")
    assert style.main() == 1
    assert "README.md:1: avoid “somebody”" in capsys.readouterr().out
