"""Checks of `timebell doctor` on the settings and this machine, without a database."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from timebell import settings as configuration
from timebell.api.authentication import LOOPBACK
from timebell.cli.doctor.findings import Check, fail, warn
from timebell.cli.loading import load_app
from timebell.errors import InvalidInput, TimebellError
from timebell.recurrence import zone
from timebell.settings import Settings
from timebell.store.open import parse_url
from timebell.targets.brokers import KINDS, is_installed
from timebell.wiring import broker_url

NETWORK_FILESYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "ceph",
    "glusterfs",
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "lustre",
)
VOLATILE_FILESYSTEMS = ("tmpfs", "ramfs", "overlay")
SECONDS_PER_DAY = 86_400
RESERVED_FILE_DESCRIPTORS = 100  # open files that are not connections of deliveries
MOUNTS_FILE = Path("/proc/self/mounts")


def check_settings(settings: Settings) -> Iterator[Check]:
    """Yield the problems of the settings and of this machine."""
    yield from _check_timezone(settings)
    yield from _check_app(settings)
    yield from _check_extras(settings)
    yield from _check_network(settings)
    yield from _check_file_permissions(os.environ)
    yield from _check_limits(settings)
    yield from _check_sqlite_file(settings.database_url)


def _check_timezone(settings: Settings) -> Iterator[Check]:
    try:
        if settings.default_timezone is not None:
            zone(settings.default_timezone)
    except InvalidInput as error:
        yield fail(
            "time zone",
            "UNKNOWN_TIMEZONE",
            error.message,
            error.fix or "Set TIMEBELL_DEFAULT_TIMEZONE to an IANA name.",
        )


def _check_app(settings: Settings) -> Iterator[Check]:
    try:
        if settings.app is not None:
            load_app(settings.app)
    except TimebellError as error:
        yield fail(
            "app",
            "APP_NOT_LOADABLE",
            error.message,
            error.fix or "Correct the app, or set TIMEBELL_APP to another one.",
        )


def _check_extras(settings: Settings) -> Iterator[Check]:
    missing = [(f"broker_{kind.replace('-', '_')}_url", broker.extra) for kind, broker in KINDS.items()
              if broker_url(kind, settings) is not None and not is_installed(kind)]  # fmt: skip
    for name, package, extra in (
        ("fcm_credentials", "hpack", "push"), ("arrivals_url", "redis", "redis"), ("alert_urls", "apprise", "alerts"),
        ("oidc_issuer", "joserfc", "oidc"),
    ):  # fmt: skip
        if getattr(settings, name) and find_spec(package) is None:
            missing.append((name, extra))
    for name, extra in missing:
        detail = f"TIMEBELL_{name.upper()} is set, but the extra {extra} is not installed"
        yield fail("extra", "EXTRA_MISSING", detail, f'Run: pip install "timebell[{extra}]"')


def _check_network(settings: Settings) -> Iterator[Check]:
    """Yield the problems of addresses that can reach this node, and that it can reach."""
    roles, address = set(settings.roles.split(",")), f"TIMEBELL_HTTP_HOST is {settings.http_host}"
    if settings.http_host not in LOOPBACK and roles & {"api", "ui"}:
        if not settings.secret_key:
            yield warn("secret key", "SECRET_KEY_MISSING", f"{address}, but TIMEBELL_SECRET_KEY is not set",
                       "Set it on every node: python -c 'import secrets; print(secrets.token_hex(32))'")  # fmt: skip
        if not settings.url.startswith("https://"):
            yield warn("http", "HTTP_WITHOUT_TLS", f"{address}, but TIMEBELL_URL is not an https address",
                       "Use a proxy that terminates TLS, and set TIMEBELL_URL=https://...")  # fmt: skip
    if settings.metrics_port is not None and settings.metrics_host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        yield warn("metrics", "METRICS_EXPOSED", f"/metrics listens on every address ({settings.metrics_host})",
                   "Set TIMEBELL_METRICS_HOST to the address that Prometheus connects to.")  # fmt: skip
    if settings.webhook_allow_private:
        yield warn("webhooks", "WEBHOOKS_TO_PRIVATE_ADDRESSES", "TIMEBELL_WEBHOOK_ALLOW_PRIVATE is true",
                   "Unset it, and list the allowed addresses: TIMEBELL_WEBHOOK_ALLOW=10.1.2.3:8080")  # fmt: skip


def _check_file_permissions(environment: Mapping[str, str]) -> Iterator[Check]:
    """Yield files with secrets that all users of the machine can read or write."""
    secret_settings = {name for name, spec in configuration.SETTINGS.items() if spec["kind"] == "secret"}
    files = [Path(value) for name, value in environment.items()
             if name.endswith("_FILE") and value
             and name.removeprefix("TIMEBELL_").removesuffix("_FILE").lower() in secret_settings]  # fmt: skip
    origins = [origin for name, _, origin in configuration.list_with_origins() if name in secret_settings]
    files += {Path(origin.partition(" in ")[2]) for origin in origins if " in " in origin}
    for path in files:
        if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            yield warn(
                "secrets", "SECRETS_FILE_READABLE", f"every user can read or write {path}", f"Run: chmod o-rwx {path}"
            )


def _check_limits(settings: Settings) -> Iterator[Check]:
    if settings.retention_done < SECONDS_PER_DAY:
        yield warn("retention", "RETENTION_TOO_SHORT", f"TIMEBELL_RETENTION_DONE is {settings.retention_done:g} s",
                   "Set it to a day or more; the default is 30d.")  # fmt: skip
    if settings.scheduler_lease < 3 * settings.scheduler_heartbeat:
        detail = f"the lease of {settings.scheduler_lease:g} s is less than 3 heartbeats of"
        yield warn("lease", "LEASE_TOO_SHORT", f"{detail} {settings.scheduler_heartbeat:g} s",
                   "Raise TIMEBELL_SCHEDULER_LEASE, or lower the heartbeat, on every node.")  # fmt: skip
    limit, needed = (
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        settings.worker_concurrency + RESERVED_FILE_DESCRIPTORS,
    )
    if 0 <= limit < needed:
        detail = f"at most {limit} files can be open, but up to {settings.worker_concurrency} jobs run concurrently"
        yield warn("files", "OPEN_FILES_LIMIT_LOW", detail,
                   f"Run: ulimit -n {needed} (systemd: LimitNOFILE=), or lower the concurrency.")  # fmt: skip


def _check_sqlite_file(url: str) -> Iterator[Check]:
    """Yield problems of the file system of a SQLite file."""
    try:
        parsed = parse_url(url)
    except InvalidInput:  # reported by the check of the database
        return
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return
    path = Path(parsed.database).resolve()
    kind = filesystem_type(path, MOUNTS_FILE.read_text()) if MOUNTS_FILE.exists() else ""
    if kind.startswith(NETWORK_FILESYSTEMS):
        yield fail("file", "SQLITE_ON_NETWORK", f"{path} is on {kind}",
                   "Move it to a local disk, or use PostgreSQL.")  # fmt: skip
    elif kind in VOLATILE_FILESYSTEMS:
        yield warn(
            "file",
            "SQLITE_NOT_PERSISTENT",
            f"{path} is on {kind}",
            "Move it to a disk, or to a volume of the container.",
        )


def filesystem_type(path: Path, mounts: str) -> str:
    """Return the file system type of a path; `mounts` is the content of /proc/self/mounts."""
    rows = [line.split() for line in mounts.splitlines()]
    mount_points = [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) > 2]
    containing = [
        (len(point), position, kind)
        for position, (point, kind) in enumerate(mount_points)
        if path.is_relative_to(point)
    ]
    return max(containing)[2] if containing else ""
