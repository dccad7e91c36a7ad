"""Settings: precedence of flags, environment, file and defaults, and refused values."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from timebell import settings
from timebell.durations import parse_duration
from timebell.errors import InvalidInput


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(code: str, **flags: object) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        settings.load(**flags)
    assert caught.value.code == code
    return caught.value


def test_defaults() -> None:
    loaded = settings.load()
    assert loaded.database_url == "sqlite:///timebell.db"
    assert (loaded.http_host, loaded.http_port) == ("127.0.0.1", 8700)
    assert (loaded.scheduler_lease, loaded.scheduler_heartbeat) == (15, 5)
    assert (loaded.worker_concurrency, loaded.worker_threads) == (500, 16)
    assert loaded.retention_done == 30 * 86_400
    assert loaded.default_timezone is None
    assert not (loaded.command_enabled or loaded.webhook_allow_private or loaded.database_auto_upgrade)


def test_flags_override_environment_file_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("timebell.toml").write_text('http_port = 1\ndefault_timezone = "Asia/Tokyo"\n[worker]\nthreads = 3\n')
    assert (settings.load().http_port, settings.load().worker_threads) == (1, 3)
    monkeypatch.setenv("TIMEBELL_HTTP_PORT", "2")
    assert settings.load().http_port == 2
    assert settings.load(http_port=3).http_port == 3
    assert settings.load(http_port=None).http_port == 2
    assert settings.load().default_timezone == "Asia/Tokyo"


def test_config_file_comes_from_timebell_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config_file = tmp_path / "other.toml"
    config_file.write_text('roles = ["planner", "worker"]\nretention_done = "1w"\n')
    monkeypatch.setenv("TIMEBELL_CONFIG", str(config_file))
    assert settings.load().roles == "planner,worker"
    assert settings.load().retention_done == 604_800
    monkeypatch.setenv("TIMEBELL_CONFIG", str(tmp_path / "none.toml"))
    refused("CONFIG_UNREADABLE")


def test_file_suffix_reads_the_value_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("whsec_from_a_file\n")
    monkeypatch.setenv("TIMEBELL_WEBHOOK_SIGNING_SECRET_FILE", str(secret))
    assert settings.load().webhook_signing_secret == "whsec_from_a_file"
    monkeypatch.setenv("TIMEBELL_WEBHOOK_SIGNING_SECRET", "whsec_too")
    assert "whsec_too" not in str(refused("DUPLICATE_SETTING"))
    monkeypatch.delenv("TIMEBELL_WEBHOOK_SIGNING_SECRET")
    monkeypatch.setenv("TIMEBELL_WEBHOOK_SIGNING_SECRET_FILE", str(tmp_path / "none"))
    refused("CONFIG_UNREADABLE")


@pytest.mark.parametrize(
    ("variable", "suggestion"),
    [
        ("TIMEBELL_DATABSE_URL", "TIMEBELL_DATABASE_URL"),
        ("TIMEBELL_HTTP_PROT", "TIMEBELL_HTTP_PORT"),
        ("TIMEBELL_http_port", "TIMEBELL_HTTP_PORT"),
        ("TIMEBELL_DATABASE_URL_FILES", "TIMEBELL_DATABASE_URL"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(
    variable: str, suggestion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    assert suggestion in refused("UNKNOWN_SETTING").fix


def test_unknown_name_in_the_config_file_is_refused() -> None:
    Path("timebell.toml").write_text("[worker]\nconcurency = 3\n")
    assert "worker_concurrency" in refused("UNKNOWN_SETTING").fix
    Path("timebell.toml").write_text("= 3")
    refused("INVALID_CONFIG")


def test_names_of_other_programs_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIMEBELL_TEST_ANYTHING", "TIMEBELL_SECRET_KEY", "TIMEBELL_URL", "TIMEBELL_API_KEY"):
        monkeypatch.setenv(name, "x")
    settings.load()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("15m", 900), ("24h", 86_400), ("30d", 2_592_000), ("90", 90), ("1.5", 1.5), ("1h30m", 5400),
     (" 2S ", 2), (timedelta(minutes=1), 60), (7, 7)],
)  # fmt: skip
def test_durations_are_parsed(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1", "1y", "1h 30", "1e9", "inf", "nan", None, "1" * 50, "1 h"])
def test_invalid_durations_are_not_parsed(text: object) -> None:
    assert parse_duration(text) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("HTTP_PORT", "0"), ("HTTP_PORT", "65536"), ("HTTP_PORT", "8700.0"), ("HTTP_PORT", "-1"),
     ("WORKER_THREADS", "none"), ("COMMAND_ENABLED", "perhaps"), ("LOG_LEVEL", "loud"), ("ROLES", "planner,cook"),
     ("WEBHOOK_TIMEOUT", "soon"), ("SCHEDULER_LEASE", "0")],
)  # fmt: skip
def test_invalid_value_is_refused_with_its_name(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TIMEBELL_{name}", value)
    assert f"TIMEBELL_{name}" in str(refused("INVALID_SETTING"))


def test_lease_must_exceed_two_heartbeats() -> None:
    refused("INVALID_LEASE", scheduler_lease=8)
    assert settings.load(scheduler_lease=8, scheduler_heartbeat=2).scheduler_lease == 8


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("YES", True), ("off", False), ("0", False), ("", False)]
)
def test_booleans_are_parsed(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEBELL_COMMAND_ENABLED", text)
    assert settings.load().command_enabled is value


def test_repr_contains_no_secret() -> None:
    loaded = settings.load(database_url="postgresql://me:hunter2@host/db", webhook_signing_secret="whsec_hush")
    assert "hunter2" not in repr(loaded)
    assert "whsec_hush" not in repr(loaded)
