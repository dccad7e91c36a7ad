"""The APP argument of the command line: accepted forms and errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from timebell import Timebell
from timebell.cli.loading import load_app, source_files
from timebell.errors import InvalidInput, TimebellError

APP = "from timebell import Timebell\nbell = app = Timebell()\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.parametrize(
    "argument", ["my.py", "my.py:bell", "./my.py", "my", "my:app", "pack.inner:app", "pack/inner.py"]
)
def test_app_is_a_file_or_a_module(argument: str) -> None:
    Path("my.py").write_text(APP)
    Path("pack").mkdir()
    Path("pack/inner.py").write_text(APP)
    assert isinstance(load_app(argument), Timebell)


def test_modules_beside_the_file_are_importable_and_watched(tmp_path: Path) -> None:
    Path("deep").mkdir()
    Path("deep/near.py").write_text("x = 1\n")
    Path("deep/my.py").write_text("import near\n" + APP)
    load_app("deep/my.py")
    assert source_files("deep/my.py") == [tmp_path / "deep" / "my.py", tmp_path / "deep" / "near.py"]


@pytest.mark.parametrize(
    ("text", "argument", "code", "expected"),
    [
        (APP, "your.py", "APP_NOT_FOUND", "no file your.py"),
        (APP, "your:app", "APP_NOT_FOUND", "no module 'your'"),
        (APP, "my.py:tim", "APP_NOT_FOUND", "my.py:bell"),
        ("x = 1", "my.py", "APP_NOT_FOUND", "app = Timebell()"),
        ("x = (", "my.py", "APP_NOT_LOADABLE", "my.py:1"),
        ("\n\n1 / 0", "my.py", "APP_NOT_LOADABLE", "my.py:3"),
        ("import nothing_like_it", "my:app", "APP_NOT_LOADABLE", "nothing_like_it"),
        ("import nothing_like_it", "my.py", "APP_NOT_LOADABLE", f"environment of this command: {sys.prefix}"),
        ("raise SystemError('x')", "my:app", "APP_NOT_LOADABLE", "SystemError: x"),
    ],
)
def test_loading_errors_name_their_location(text: str, argument: str, code: str, expected: str) -> None:
    Path("my.py").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        load_app(argument)
    assert caught.value.code == code
    assert expected in str(caught.value)


def test_errors_of_calls_in_the_app_keep_their_code() -> None:
    schedule = "@app.schedule('x', cron='61 * * * *', timezone='UTC')\ndef f(event): ...\n"
    Path("my.py").write_text(APP + schedule)
    with pytest.raises(TimebellError) as caught:
        load_app("my.py")
    assert caught.value.code == "INVALID_CRON"
