"""APP on the command line: what it may be, and what is said when it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from timebell import Timebell
from timebell.cli.loading import load_app, sources
from timebell.errors import InvalidInput, TimebellError

APP = "from timebell import Timebell\nbell = app = Timebell()\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.parametrize("given", ["my.py", "my.py:bell", "./my.py", "my", "my:app", "pack.inner:app", "pack/inner.py"])
def test_a_file_or_a_module(given: str) -> None:
    Path("my.py").write_text(APP)
    Path("pack").mkdir()
    Path("pack/inner.py").write_text(APP)
    assert isinstance(load_app(given), Timebell)


def test_a_file_imports_its_neighbours_and_they_are_watched(tmp_path: Path) -> None:
    Path("deep").mkdir()
    Path("deep/near.py").write_text("x = 1\n")
    Path("deep/my.py").write_text("import near\n" + APP)
    load_app("deep/my.py")
    assert sources("deep/my.py") == [tmp_path / "deep" / "my.py", tmp_path / "deep" / "near.py"]


@pytest.mark.parametrize(
    ("text", "given", "code", "said"),
    [
        (APP, "your.py", "APP_NOT_FOUND", "no file your.py"),
        (APP, "your:app", "APP_NOT_FOUND", "no module 'your'"),
        (APP, "my.py:tim", "APP_NOT_FOUND", "my.py:bell"),
        ("x = 1", "my.py", "APP_NOT_FOUND", "app = Timebell()"),
        ("x = (", "my.py", "APP_BROKEN", "my.py:1"),
        ("\n\n1 / 0", "my.py", "APP_BROKEN", "my.py:3"),
        ("import nothing_like_it", "my:app", "APP_BROKEN", "nothing_like_it"),
        ("raise SystemError('x')", "my:app", "APP_BROKEN", "SystemError: x"),
    ],
)
def test_what_goes_wrong_is_said_with_its_place(text: str, given: str, code: str, said: str) -> None:
    Path("my.py").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        load_app(given)
    assert caught.value.code == code
    assert said in str(caught.value)


def test_what_the_apps_own_calls_refuse_keeps_its_code() -> None:
    schedule = "@app.schedule('x', cron='61 * * * *', timezone='UTC')\ndef f(event): ...\n"
    Path("my.py").write_text(APP + schedule)
    with pytest.raises(TimebellError) as caught:
        load_app("my.py")
    assert caught.value.code == "INVALID_CRON"
