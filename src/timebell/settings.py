"""Settings. No other module reads the environment or `timebell.toml`.

A value comes from the first of: a flag, `TIMEBELL_<NAME>` (or the file named by `TIMEBELL_<NAME>_FILE`), a table in
`timebell.toml` (`[worker] concurrency` is `worker_concurrency`), the default. Unknown names are errors. This module
imports little, because `import timebell` imports it; pydantic-settings would multiply the time of that import by ten.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from timebell.durations import parse_duration
from timebell.errors import InvalidInput

PREFIX = "TIMEBELL_"
TEST_PREFIX = "TIMEBELL_TEST_"
# Accepted names that are not settings: TIMEBELL_CONFIG names the configuration file.
RESERVED_NAMES = frozenset({"config"})
ROLES = ("planner", "worker", "api", "ui")


def _setting(
    default: Any, kind: str, *, minimum: float | None = None, maximum: float | None = None, choices: Any = ()
) -> Any:
    secret = kind == "secret"
    metadata = {"kind": kind, "minimum": minimum, "maximum": maximum, "choices": tuple(choices)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, validated. Durations are seconds; secrets are excluded from the repr."""

    database_url: str = _setting("sqlite:///timebell.db", "secret")
    database_schema: str | None = _setting(None, "text")
    database_auto_upgrade: bool = _setting(False, "bool")
    lost_jobs: str = _setting("hold", "word", choices=("hold", "run", "report"))
    secret_key: str | None = _setting(None, "secret")
    default_timezone: str | None = _setting(None, "text")
    app: str | None = _setting(None, "text")
    deployment: str | None = _setting(None, "text")
    features: str = _setting("campaigns,triggers", "list", choices=("campaigns", "triggers", "none"))
    node_name: str = _setting(lambda: f"{os.uname().nodename}-{os.getpid()}", "text")
    roles: str = _setting(",".join(ROLES), "list", choices=ROLES)
    worker_concurrency: int = _setting(500, "int", minimum=1, maximum=100_000)
    worker_threads: int = _setting(16, "int", minimum=1, maximum=1000)
    worker_drain_timeout: float = _setting(30.0, "duration", minimum=0)
    scheduler_lease: float = _setting(15.0, "duration", minimum=1)
    scheduler_heartbeat: float = _setting(5.0, "duration", minimum=0.1)
    scheduler_max_clock_skew: float = _setting(5.0, "duration", minimum=0.05)
    retention_done: float = _setting(30 * 86_400.0, "duration", minimum=0)
    webhook_signing_secret: str | None = _setting(None, "secret")
    webhook_allow_private: bool = _setting(False, "bool")
    webhook_allow: str | None = _setting(None, "text")
    webhook_timeout: float = _setting(10.0, "duration", minimum=0.001)
    command_enabled: bool = _setting(False, "bool")
    broker_bullmq_url: str | None = _setting(None, "secret")
    broker_celery_url: str | None = _setting(None, "secret")
    broker_redis_stream_url: str | None = _setting(None, "secret")
    broker_rabbitmq_url: str | None = _setting(None, "secret")
    broker_kafka_url: str | None = _setting(None, "secret")
    broker_nats_url: str | None = _setting(None, "secret")
    broker_sqs_url: str | None = _setting(None, "secret")
    fcm_credentials: str | None = _setting(None, "secret")
    fcm_messages_per_minute: int = _setting(600_000, "int", minimum=1, maximum=100_000_000)
    fcm_connections: int = _setting(4, "int", minimum=1, maximum=100)
    fcm_url: str = _setting("https://fcm.googleapis.com", "text")
    arrivals_url: str | None = _setting(None, "secret")
    http_host: str = _setting("127.0.0.1", "text")
    http_port: int = _setting(8700, "int", minimum=1, maximum=65_535)
    http_trusted_proxies: str | None = _setting(None, "text")
    http_cors_origins: str | None = _setting(None, "text")
    oidc_issuer: str | None = _setting(None, "text")
    oidc_client_id: str | None = _setting(None, "text")
    oidc_client_secret: str | None = _setting(None, "secret")
    oidc_scopes: str = _setting("openid profile email", "text")
    oidc_audience: str | None = _setting(None, "text")
    oidc_role_claim: str = _setting("groups", "text")
    oidc_role_map: str | None = _setting(None, "text")
    password_sign_in: bool = _setting(True, "bool")
    url: str = _setting("http://127.0.0.1:8700", "text")
    api_key: str | None = _setting(None, "secret")
    tenant: str | None = _setting(None, "text")
    metrics_host: str = _setting("127.0.0.1", "text")
    metrics_port: int | None = _setting(None, "int", minimum=1, maximum=65_535)
    metrics_schedule_label: bool = _setting(False, "bool")
    otel_enabled: bool = _setting(False, "bool")
    audit_webhook_url: str | None = _setting(None, "secret")
    audit_syslog_url: str | None = _setting(None, "text")
    alert_urls: str | None = _setting(None, "secret")
    log_level: str = _setting("info", "word", choices=("debug", "info", "warning", "error"))
    log_format: str = _setting("auto", "word", choices=("auto", "text", "json"))
    output: str = _setting("table", "word", choices=("table", "json", "yaml", "csv"))


SETTINGS = {each.name: each.metadata for each in fields(Settings)}


def load(**flags: Any) -> Settings:
    """Load the settings of this process; flags that are None are ignored.

    Raises InvalidInput (UNKNOWN_SETTING, INVALID_SETTING, ...).
    """
    values = {name: parse_setting(name, raw, origin) for name, raw, origin in _from_file(os.environ)}
    values |= {name: parse_setting(name, raw, origin) for name, raw, origin in _from_environment(os.environ)}
    values |= {name: parse_setting(name, flag, name) for name, flag in flags.items() if flag is not None}
    settings = Settings(**values)
    if settings.scheduler_lease < 2 * settings.scheduler_heartbeat:
        raise _invalid(
            "scheduler_lease", "INVALID_LEASE", f"is {settings.scheduler_lease:g} s; it must be at least"
            f" twice the heartbeat ({settings.scheduler_heartbeat:g} s)"
        )  # fmt: skip
    return _with_schema_in_url(settings)


def _with_schema_in_url(settings: Settings) -> Settings:
    """Return settings whose `database_url` contains `database_schema`, if it is a URL of PostgreSQL."""
    schema, url = settings.database_schema, settings.database_url
    if schema is None or not url.startswith("postgres"):
        return settings
    query = url.rpartition("@")[2].partition("?")[2]
    if any(option.startswith("schema=") for option in query.split("&")):
        return settings
    return replace(settings, database_url=f"{url}{'&' if query else '?'}schema={quote(schema)}")


def list_with_origins() -> list[tuple[str, Any, str]]:
    """Return (setting, value, origin) for every setting of this process; secrets are masked.

    Raises InvalidInput.
    """
    settings = load()
    origins = {name: origin for name, _, origin in _from_file(os.environ)}
    origins |= {name: origin for name, _, origin in _from_environment(os.environ)}
    rows = []
    for name, metadata in SETTINGS.items():
        value = getattr(settings, name)
        masked = "(set)" if metadata["kind"] == "secret" and value is not None else value
        rows.append((name, masked, origins.get(name, "default")))
    return rows


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, variable) for each TIMEBELL_ variable that is not empty."""
    for variable, raw in environment.items():
        if not variable.startswith(PREFIX) or variable.startswith(TEST_PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        base_name = name.removesuffix("_file")
        if variable != variable.upper() or (
            name not in SETTINGS and base_name not in SETTINGS and base_name not in RESERVED_NAMES
        ):
            raise _unknown_setting(variable, [PREFIX + known.upper() for known in (*SETTINGS, *RESERVED_NAMES)])
        if base_name in RESERVED_NAMES or not raw.strip():
            continue
        if name in SETTINGS:
            yield name, raw, variable
        elif environment.get(PREFIX + base_name.upper(), "").strip():
            message = f"and {PREFIX}{base_name.upper()} are both set"
            raise _invalid(variable, "DUPLICATE_SETTING", message, "Keep one of them.")
        else:
            yield base_name, _read_file(Path(raw), variable), variable


def _from_file(environment: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, origin) for each entry of the configuration file, tables flattened."""
    configured_path = environment.get(PREFIX + "CONFIG")
    path = Path(configured_path or "timebell.toml")
    if not configured_path and not path.is_file():
        return
    import tomllib

    try:
        document = tomllib.loads(_read_file(path, PREFIX + "CONFIG"))
    except tomllib.TOMLDecodeError as error:
        raise _invalid(str(path), "INVALID_CONFIG", f"is not valid TOML: {error}") from error
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat |= {f"{key}_{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {key: value}
    for name, value in flat.items():
        if name not in SETTINGS:
            raise _unknown_setting(name, list(SETTINGS), f" in {path}")
        yield name, value, f"{name} in {path}"


def _read_file(path: Path, origin: str) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(origin, "CONFIG_UNREADABLE", f"names the file {path}, which cannot be read: {error}") from error


def parse_setting(name: str, raw: Any, origin: str) -> Any:
    """Convert a raw value to the type of its setting.

    `origin` is where the value comes from. Raises InvalidInput (INVALID_SETTING), whose message has no secret.
    """
    metadata = SETTINGS[name]
    kind, choices = metadata["kind"], metadata["choices"]
    minimum, maximum = metadata["minimum"], metadata["maximum"]
    value = _PARSERS[kind](raw, choices)
    if value is None or (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        invalid = "" if kind == "secret" else f" {raw!r:.60};"
        expected = _EXPECTED[kind].format(minimum=minimum, maximum=maximum, choices=", ".join(choices))
        raise _invalid(origin, "INVALID_SETTING", f"is{invalid} not valid: use {expected}")
    return value


def _parse_int(raw: Any, _: tuple[str, ...]) -> int | None:
    return int(raw) if re.fullmatch(r"\d{1,9}", str(raw).strip()) else None


def _parse_bool(raw: Any, _: tuple[str, ...]) -> bool | None:
    return _BOOLEANS.get(str(raw).strip().lower())


def _parse_list(raw: Any, choices: tuple[str, ...]) -> str | None:
    items = [str(item).strip() for item in (raw if isinstance(raw, list) else str(raw).split(","))]
    return ",".join(items) if set(items) <= set(choices) else None


def _parse_word(raw: Any, choices: tuple[str, ...]) -> str | None:
    word = (_parse_text(raw, ()) or "").lower()
    return word if word in choices else None


def _parse_text(raw: Any, _: tuple[str, ...]) -> str | None:
    text = raw.strip() if isinstance(raw, str) and "\x00" not in raw else None
    return text or None


_BOOLEANS = {
    "true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False
}  # fmt: skip
_PARSERS: dict[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "duration": lambda raw, _: parse_duration(raw),
    "int": _parse_int,
    "bool": _parse_bool,
    "list": _parse_list,
    "word": _parse_word,
    "text": _parse_text,
    "secret": _parse_text,
}
_EXPECTED = {
    "duration": "a duration such as 500ms, 15m, 24h or 30d, of at least {minimum:g} s",
    "int": "an integer from {minimum} to {maximum}",
    "bool": "true or false",
    "list": "some of {choices}",
    "word": "one of {choices}",
    "text": "text",
    "secret": "text",
}


def _invalid(origin: str, code: str, message: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{origin} {message}.", code=code, fix=fix)


def _unknown_setting(name: str, known: list[str], context: str = "") -> InvalidInput:
    from difflib import get_close_matches

    by_upper_case = {each.upper(): each for each in known}
    near = get_close_matches(name.upper(), by_upper_case, 1)
    fix = f"Did you mean {by_upper_case[near[0]]}?" if near else "See docs/reference/configuration.md."
    return InvalidInput(f"There is no setting {name}{context}.", code="UNKNOWN_SETTING", fix=fix)


@cache  # reading the metadata of a package takes a millisecond
def package_version() -> str:
    """Return the version of the installed package, or `0.0.0+source` for an uninstalled source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("timebell")
    except PackageNotFoundError:
        return "0.0.0+source"


def systemd_notify_settings() -> tuple[str | None, float | None]:
    """Return systemd's notification socket and the watchdog timeout in seconds; None if not set (sd_notify(3))."""
    watched_pid, micros = os.environ.get("WATCHDOG_PID", str(os.getpid())), os.environ.get("WATCHDOG_USEC", "")
    is_watched = micros.isdigit() and int(micros) > 0 and watched_pid == str(os.getpid())
    return os.environ.get("NOTIFY_SOCKET") or None, int(micros) / 1e6 if is_watched else None


def colors_disabled() -> bool:
    """Return whether the user disabled colors (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))
