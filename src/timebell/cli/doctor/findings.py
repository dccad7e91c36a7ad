"""What `timebell doctor` can find, each with a code that stays and the reason why it matters."""

from __future__ import annotations

from dataclasses import dataclass

WHY = {
    "DATABASE_MISSING": "Nothing is stored yet.",
    "DATABASE_UNREACHABLE": "Without its database no node fires anything.",
    "DATABASE_NOT_UPGRADED": "Nodes of this release refuse to start on other tables.",
    "DATABASE_OLD": "Timebell uses what PostgreSQL has since 13 and SQLite since 3.35.",
    "DATABASE_READ_ONLY": "Firing writes: a standby, or a role that may only read, cannot be fired from.",
    "DATABASE_NOT_UTF8": "Names and payloads are any text, which only UTF8 can hold.",
    "DATABASE_NOT_DURABLE": "A crash or power cut can lose acknowledged jobs.",
    "ROLE_TOO_STRONG": "A superuser may do anything in the server: a stolen URL is the loss of all of it.",
    "CONNECTION_UNENCRYPTED": "The password and all payloads pass the network as they are.",
    "CONNECTIONS_SCARCE": "A node takes up to 20 connections, and waits for those it does not get.",
    "AUTOVACUUM_OFF": "The tables of live jobs change all the time, and without it grow and slow down for ever.",
    "STATEMENT_TIMEOUT_SHORT": "Retention, audits and migrations have statements of seconds, which would be cut off.",
    "POOLER_WITHOUT_IDLE_LIMIT": "A node that is frozen in a transaction keeps its locks until somebody notices.",
    "NOTIFY_UNHEARD": "Everything works, but new jobs are noticed up to 1 s later.",
    "SQLITE_ON_NETWORK": "Locks of network file systems do not hold, and the file may break.",
    "SQLITE_NOT_KEPT": "What lies in memory, or in a container's own layer, is gone with it.",
    "DISK_ALMOST_FULL": "On a full disk nothing is written any more, so nothing fires.",
    "CLOCK_SKEWED": "Timebell follows the database's clock, so jobs are on its time.",
    "ZONE_DATA_DIFFERS": "Whoever has older rules may get local times wrong.",
    "VERSIONS_DIFFER": "Fine while nodes are replaced one by one, not for longer.",
    "NO_LIVE_NODE": "There is work, and nobody to do it.",
    "ALL_PAUSED": "No occurrence is planned and no job claimed, on any node.",
    "JOBS_UNHEARD": "They wait until a node listens to their topic.",
    "SCHEDULES_SET_ASIDE": "They do not fire until they are mended.",
    "TARGETS_DISABLED": "Jobs for them fail, as their receiver said that it is gone (410).",
    "BACKLOG_WAITS": "More was due after an outage or a restore than is made up for unasked.",
    "SECRETS_UNREADABLE": "Targets and sources that need them fail.",
    "SECRET_KEY_MISSING": "Others can reach this address, and without it there are no API keys and no sign-in.",
    "SECRETS_IN_THE_OPEN": "Every user of this machine can read the secrets in it.",
    "HTTP_WITHOUT_TLS": "API keys and payloads pass the network as they are.",
    "METRICS_EXPOSED": "Names of topics and queues are told to whoever asks.",
    "WEBHOOKS_REACH_INSIDE": "Whoever may make jobs may call everything that this machine can reach.",
    "EXTRA_MISSING": "What is set up with it does not work on this node.",
    "RETENTION_SHORT": "Audits and the history reach no further back than this.",
    "LEASE_TIGHT": "A node that is slow for a moment is taken for dead, and its jobs start a second time.",
    "OPEN_FILES_FEW": "Each delivery may hold a connection: above the limit they fail.",
    "APP_BROKEN": "A node cannot start with it.",
    "ZONE_UNKNOWN": "Everything that is given no zone of its own is refused.",
    "PORT_TAKEN": "A process that answers HTTP cannot start here (unless what holds the port is Timebell itself).",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `verdict` is ok, warn or fail; of the latter two, `why` and the `fix`."""

    verdict: str
    name: str
    detail: str
    fix: str = ""
    code: str = ""
    why: str = ""


def warn(name: str, code: str, detail: str, fix: str) -> Check:
    """It works, and will not always."""
    return Check("warn", name, detail, fix, code, WHY[code])


def fail(name: str, code: str, detail: str, fix: str) -> Check:
    """It does not work."""
    return Check("fail", name, detail, fix, code, WHY[code])
