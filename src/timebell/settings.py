"""Settings: the only reader of the environment and of `timebell.toml`.

A value comes from the first of: a flag, `TIMEBELL_<NAME>` (or the file that `TIMEBELL_<NAME>_FILE` names), the
table in `timebell.toml` (`[worker] concurrency` is `worker_concurrency`), the default. A name nobody knows is
an error. Kept light: importing `timebell` imports this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from timebell.errors import InvalidInput

PREFIX = "TIMEBELL_"
NOT_OURS = "TIMEBELL_TEST_"
# Names that are understood, but are no settings: this module's own.
ELSEWHERE = frozenset({"config"})
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
ROLES = ("planner", "worker", "api", "ui")


def _setting(default: Any, kind: str, *, least: float | None = None, most: float | None = None, words: Any = ()) -> Any:
    secret = kind == "secret"
    limits = {"kind": kind, "least": least, "most": most, "words": tuple(words)}
    if callable(default):
        return field(default_factory=default, metadata=limits)
    return field(default=default, repr=not secret, metadata=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting, checked. Durations are seconds; secrets are not in the repr."""

    database_url: str = _setting("sqlite:///timebell.db", "secret")
    database_auto_upgrade: bool = _setting(False, "bool")
    secret_key: str | None = _setting(None, "secret")
    default_timezone: str | None = _setting(None, "text")
    app: str | None = _setting(None, "text")
    node_name: str = _setting(lambda: f"{os.uname().nodename}-{os.getpid()}", "text")
    roles: str = _setting(",".join(ROLES), "list", words=ROLES)
    worker_concurrency: int = _setting(500, "int", least=1, most=100_000)
    worker_threads: int = _setting(16, "int", least=1, most=1000)
    worker_drain_timeout: float = _setting(30.0, "duration", least=0)
    scheduler_lease: float = _setting(15.0, "duration", least=1)
    scheduler_heartbeat: float = _setting(5.0, "duration", least=0.1)
    scheduler_max_clock_skew: float = _setting(5.0, "duration", least=0.05)
    retention_done: float = _setting(30 * 86_400.0, "duration", least=0)
    webhook_signing_secret: str | None = _setting(None, "secret")
    webhook_allow_private: bool = _setting(False, "bool")
    webhook_allow: str | None = _setting(None, "text")
    webhook_timeout: float = _setting(10.0, "duration", least=0.001)
    command_enabled: bool = _setting(False, "bool")
    broker_bullmq_url: str | None = _setting(None, "secret")
    broker_celery_url: str | None = _setting(None, "secret")
    broker_redis_stream_url: str | None = _setting(None, "secret")
    broker_rabbitmq_url: str | None = _setting(None, "secret")
    broker_kafka_url: str | None = _setting(None, "secret")
    broker_nats_url: str | None = _setting(None, "secret")
    broker_sqs_url: str | None = _setting(None, "secret")
    fcm_credentials: str | None = _setting(None, "secret")
    fcm_messages_per_minute: int = _setting(600_000, "int", least=1, most=100_000_000)
    fcm_connections: int = _setting(4, "int", least=1, most=100)
    fcm_url: str = _setting("https://fcm.googleapis.com", "text")
    arrivals_url: str | None = _setting(None, "secret")
    http_host: str = _setting("127.0.0.1", "text")
    http_port: int = _setting(8700, "int", least=1, most=65_535)
    url: str = _setting("http://127.0.0.1:8700", "text")
    api_key: str | None = _setting(None, "secret")
    tenant: str | None = _setting(None, "text")
    metrics_host: str = _setting("127.0.0.1", "text")
    metrics_port: int | None = _setting(None, "int", least=1, most=65_535)
    metrics_schedule_label: bool = _setting(False, "bool")
    otel_enabled: bool = _setting(False, "bool")
    alert_urls: str | None = _setting(None, "secret")
    log_level: str = _setting("info", "word", words=("debug", "info", "warning", "error"))
    log_format: str = _setting("auto", "word", words=("auto", "text", "json"))
    output: str = _setting("table", "word", words=("table", "json", "yaml", "csv"))


NAMES = {each.name: each.metadata for each in fields(Settings)}


def load(**flags: Any) -> Settings:
    """The settings of this process; a flag of None was not given. Raises InvalidInput (UNKNOWN_SETTING, ...)."""
    values = {name: read(name, raw, origin) for name, raw, origin in _from_file(os.environ)}
    values |= {name: read(name, raw, origin) for name, raw, origin in _from_environment(os.environ)}
    values |= {name: read(name, given, name) for name, given in flags.items() if given is not None}
    settings = Settings(**values)
    if settings.scheduler_lease < 2 * settings.scheduler_heartbeat:
        raise _unfit(
            "scheduler_lease", "INVALID_LEASE", f"is {settings.scheduler_lease:g} s; it has to be at least"
            f" twice the heartbeat ({settings.scheduler_heartbeat:g} s)"
        )  # fmt: skip
    return settings


def explained() -> list[tuple[str, Any, str]]:
    """(setting, value, where it comes from) for every setting of this process; secrets are not shown.

    Raises InvalidInput.
    """
    settings = load()
    origins = {name: origin for name, _, origin in _from_file(os.environ)}
    origins |= {name: origin for name, _, origin in _from_environment(os.environ)}
    found = []
    for name, about in NAMES.items():
        value = getattr(settings, name)
        shown = "(set)" if about["kind"] == "secret" and value is not None else value
        found.append((name, shown, origins.get(name, "default")))
    return found


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(name, value, variable) for each of our variables. Empty ones count as not given."""
    for variable, raw in environment.items():
        if not variable.startswith(PREFIX) or variable.startswith(NOT_OURS):
            continue
        name = variable.removeprefix(PREFIX).lower()
        plain = name.removesuffix("_file")
        if variable != variable.upper() or (name not in NAMES and plain not in NAMES and plain not in ELSEWHERE):
            raise _unknown(variable, [PREFIX + known.upper() for known in (*NAMES, *ELSEWHERE)])
        if plain in ELSEWHERE or not raw.strip():
            continue
        if name in NAMES:
            yield name, raw, variable
        elif environment.get(PREFIX + plain.upper(), "").strip():
            raise _unfit(variable, "SETTING_TWICE", f"and {PREFIX}{plain.upper()} are both set", "Keep one of them.")
        else:
            yield plain, _contents(Path(raw), variable), variable


def _from_file(environment: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """(name, value, where) for each entry of the configuration file, tables flattened."""
    named = environment.get(PREFIX + "CONFIG")
    path = Path(named or "timebell.toml")
    if not named and not path.is_file():
        return
    import tomllib

    try:
        found = tomllib.loads(_contents(path, PREFIX + "CONFIG"))
    except tomllib.TOMLDecodeError as bad:
        raise _unfit(str(path), "CONFIG_INVALID", f"is not TOML: {bad}") from bad
    flat: dict[str, Any] = {}
    for key, value in found.items():
        flat |= {f"{key}_{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {key: value}
    for name, value in flat.items():
        if name not in NAMES:
            raise _unknown(name, list(NAMES), f" in {path}")
        yield name, value, f"{name} in {path}"


def _contents(path: Path, origin: str) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as failed:
        raise _unfit(origin, "CONFIG_UNREADABLE", f"names the file {path}, which cannot be read: {failed}") from failed


def read(name: str, raw: Any, origin: str) -> Any:
    """One value in its setting's type. Raises InvalidInput (INVALID_SETTING); never shows a secret."""
    about = NAMES[name]
    kind, words = about["kind"], about["words"]
    if kind == "duration":
        value: Any = duration(raw)
        wanted = f"a duration such as 500ms, 15m, 24h or 30d, of at least {about['least']:g} s"
    elif kind == "int":
        value = int(raw) if re.fullmatch(r"\d{1,9}", str(raw).strip()) else None
        wanted = f"a whole number from {about['least']} to {about['most']}"
    elif kind == "bool":
        value = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False,
                 "off": False}.get(str(raw).strip().lower())  # fmt: skip
        wanted = "true or false"
    elif kind == "list":
        given = [str(each).strip() for each in (raw if isinstance(raw, list) else str(raw).split(","))]
        value, wanted = (",".join(given) if set(given) <= set(words) else None), f"some of {', '.join(words)}"
    else:
        value = raw.strip() if isinstance(raw, str) and "\x00" not in raw else None
        value, wanted = (value or None), (f"one of {', '.join(words)}" if words else "text")
        if words and value is not None:
            value = value.lower() if value.lower() in words else None
    least, most = about["least"], about["most"]
    if value is None or (least is not None and value < least) or (most is not None and value > most):
        shown = "" if kind == "secret" else f" {raw!r:.60};"
        raise _unfit(origin, "INVALID_SETTING", f"is{shown} not usable: give {wanted}")
    return value


def duration(raw: Any) -> float | None:
    """Seconds from `500ms`, `15m`, `1h30m`, a number of seconds or a timedelta; None for anything else."""
    if isinstance(raw, timedelta):
        return raw.total_seconds()
    text = str(raw).strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text) and len(text) < 16:
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhdw])", text)
    if not parts or len(text) > 40 or "".join(number + unit for number, unit in parts) != text:
        return None
    return float(sum(float(number) * UNITS[unit] for number, unit in parts))


def _unfit(origin: str, code: str, message: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{origin} {message}.", code=code, fix=fix)


def _unknown(name: str, known: list[str], where: str = "") -> InvalidInput:
    from difflib import get_close_matches

    spelt = {each.upper(): each for each in known}
    near = get_close_matches(name.upper(), spelt, 1)
    fix = f"Did you mean {spelt[near[0]]}?" if near else "The settings are in docs/reference/configuration.md."
    return InvalidInput(f"There is no setting {name}{where}.", code="UNKNOWN_SETTING", fix=fix)


def package_version() -> str:
    """The version of the installed package; of a bare source tree, one that says so."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("timebell")
    except PackageNotFoundError:
        return "0.0.0+source"


def systemd() -> tuple[str | None, float | None]:
    """Where systemd wants to be told how this process is, and within how many seconds at least (sd_notify(3))."""
    wanted, micros = os.environ.get("WATCHDOG_PID", str(os.getpid())), os.environ.get("WATCHDOG_USEC", "")
    watched = micros.isdigit() and int(micros) > 0 and wanted == str(os.getpid())
    return os.environ.get("NOTIFY_SOCKET") or None, int(micros) / 1e6 if watched else None


def colourless() -> bool:
    """Whether the user wants no colours (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))
