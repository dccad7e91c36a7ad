"""What `timebell doctor` sees in the settings and on this machine, without a database."""

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
from timebell.store.open import address
from timebell.targets.brokers import KINDS, installed
from timebell.wiring import broker_url

NETWORKED = (
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
GONE_WITH_IT = ("tmpfs", "ramfs", "overlay")
DAY = 86_400
BESIDE = 100  # files that are open whatever runs
MOUNTS = Path("/proc/self/mounts")


def look(chosen: Settings) -> Iterator[Check]:
    """Everything that is wrong."""
    yield from _zone(chosen)
    yield from _app(chosen)
    yield from _extras(chosen)
    yield from _doors(chosen)
    yield from _readable(os.environ)
    yield from _numbers(chosen)
    yield from _file(chosen.database_url)


def _zone(chosen: Settings) -> Iterator[Check]:
    try:
        if chosen.default_timezone is not None:
            zone(chosen.default_timezone)
    except InvalidInput as unknown:
        yield fail("time zone", "ZONE_UNKNOWN", unknown.message, unknown.fix or "Set TIMEBELL_DEFAULT_TIMEZONE to one.")


def _app(chosen: Settings) -> Iterator[Check]:
    try:
        if chosen.app is not None:
            load_app(chosen.app)
    except TimebellError as broken:
        yield fail("app", "APP_BROKEN", broken.message, broken.fix or "Mend it, or set TIMEBELL_APP to another.")


def _extras(chosen: Settings) -> Iterator[Check]:
    wanted = [(f"broker_{kind.replace('-', '_')}_url", of.extra) for kind, of in KINDS.items()
              if broker_url(kind, chosen) is not None and not installed(kind)]  # fmt: skip
    for name, package, extra in (
        ("fcm_credentials", "hpack", "push"), ("arrivals_url", "redis", "redis"), ("alert_urls", "apprise", "alerts"),
    ):  # fmt: skip
        if getattr(chosen, name) and find_spec(package) is None:
            wanted.append((name, extra))
    for name, extra in wanted:
        detail = f"TIMEBELL_{name.upper()} is set, and the extra {extra} is not installed"
        yield fail("extra", "EXTRA_MISSING", detail, f'Run: pip install "timebell[{extra}]"')


def _doors(chosen: Settings) -> Iterator[Check]:
    """Who can reach this node, and what it can reach."""
    roles, at = set(chosen.roles.split(",")), f"TIMEBELL_HTTP_HOST is {chosen.http_host}"
    if chosen.http_host not in LOOPBACK and roles & {"api", "ui"}:
        if not chosen.secret_key:
            yield warn("secret key", "SECRET_KEY_MISSING", f"{at}, and TIMEBELL_SECRET_KEY is not set",
                       "Set it on every node: python -c 'import secrets; print(secrets.token_hex(32))'")  # fmt: skip
        if not chosen.url.startswith("https://"):
            yield warn("http", "HTTP_WITHOUT_TLS", f"{at}, and TIMEBELL_URL is no https address",
                       "Put a proxy that ends TLS in front, and say so: TIMEBELL_URL=https://...")  # fmt: skip
    if chosen.metrics_port is not None and chosen.metrics_host in ("0.0.0.0", "::"):  # noqa: S104 - looked for
        yield warn("metrics", "METRICS_EXPOSED", f"/metrics listens on every address ({chosen.metrics_host})",
                   "Set TIMEBELL_METRICS_HOST to the address that Prometheus comes by.")  # fmt: skip
    if chosen.webhook_allow_private:
        yield warn("webhooks", "WEBHOOKS_REACH_INSIDE", "TIMEBELL_WEBHOOK_ALLOW_PRIVATE is true",
                   "Unset it, and name what is meant: TIMEBELL_WEBHOOK_ALLOW=10.1.2.3:8080")  # fmt: skip


def _readable(environment: Mapping[str, str]) -> Iterator[Check]:
    """Files with secrets that others may read."""
    secret = {name for name, about in configuration.NAMES.items() if about["kind"] == "secret"}
    files = [Path(value) for name, value in environment.items()
             if name.endswith("_FILE") and name.removeprefix("TIMEBELL_").removesuffix("_FILE").lower() in secret
             and value]  # fmt: skip
    origins = [origin for name, _, origin in configuration.explained() if name in secret]
    files += {Path(origin.partition(" in ")[2]) for origin in origins if " in " in origin}
    for path in files:
        if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            yield warn("secrets", "SECRETS_IN_THE_OPEN", f"{path} can be read by everyone", f"Run: chmod o-rwx {path}")


def _numbers(chosen: Settings) -> Iterator[Check]:
    if chosen.retention_done < DAY:
        yield warn("retention", "RETENTION_SHORT", f"TIMEBELL_RETENTION_DONE is {chosen.retention_done:g} s",
                   "Set it to a day or more; the default is 30d.")  # fmt: skip
    if chosen.scheduler_lease < 3 * chosen.scheduler_heartbeat:
        detail = f"the lease of {chosen.scheduler_lease:g} s is less than 3 heartbeats of"
        yield warn("lease", "LEASE_TIGHT", f"{detail} {chosen.scheduler_heartbeat:g} s",
                   "Raise TIMEBELL_SCHEDULER_LEASE, or lower the heartbeat, on every node.")  # fmt: skip
    most, need = resource.getrlimit(resource.RLIMIT_NOFILE)[0], chosen.worker_concurrency + BESIDE
    if 0 <= most < need:
        detail = f"{most} files may be open, and {chosen.worker_concurrency} jobs run at once"
        yield warn("files", "OPEN_FILES_FEW", detail,
                   f"Run: ulimit -n {need} (LimitNOFILE= of systemd), or lower the concurrency.")  # fmt: skip


def _file(url: str) -> Iterator[Check]:
    """On what a SQLite file lies."""
    try:
        made = address(url)
    except InvalidInput:  # which is said of the database
        return
    if made.get_backend_name() != "sqlite" or not made.database:
        return
    path = Path(made.database).resolve()
    kind = filesystem(path, MOUNTS.read_text()) if MOUNTS.exists() else ""
    if kind.startswith(NETWORKED):
        yield fail("file", "SQLITE_ON_NETWORK", f"{path} is on {kind}",
                   "Move it to a local disk, or use PostgreSQL.")  # fmt: skip
    elif kind in GONE_WITH_IT:
        yield warn("file", "SQLITE_NOT_KEPT", f"{path} is on {kind}", "Put it on a disk, or a volume of the container.")


def filesystem(path: Path, mounts: str) -> str:
    """The kind of file system that a path is on; `mounts` is as /proc/self/mounts says it."""
    rows = [line.split() for line in mounts.splitlines()]
    on = [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) > 2]
    over = [(len(point), at, kind) for at, (point, kind) in enumerate(on) if path.is_relative_to(point)]
    return max(over)[2] if over else ""
