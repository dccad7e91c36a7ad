"""Tests change the machine only with permission."""

from __future__ import annotations

import subprocess

import pytest

from tests import debian_packages


def test_nothing_is_installed_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(debian_packages.PERMISSION, raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ran a command"))
    with pytest.raises(pytest.skip.Exception, match="TIMEBELL_TEST_APT=1"):
        debian_packages.install("hello")
