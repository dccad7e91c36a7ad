"""Findings of `timebell doctor`: stable codes, each with the reason why it matters."""

from __future__ import annotations

from dataclasses import dataclass

REASONS = {
    "DATABASE_MISSING": "There is no database yet.",
    "DATABASE_UNREACHABLE": "No node can fire anything without its database.",
    "DATABASE_NOT_UPGRADED": "Nodes of this release refuse to start on another schema version.",
    "DATABASE_TOO_OLD": "Timebell uses features of PostgreSQL 13 and SQLite 3.35.",
    "DATABASE_READ_ONLY": "Firing needs write access, which a standby or a read-only role does not have.",
    "DATABASE_NOT_UTF8": "Names and payloads may contain any Unicode text, which only UTF8 can store.",
    "DATABASE_NOT_DURABLE": "A crash or power cut can lose acknowledged jobs.",
    "ROLE_TOO_STRONG": "A superuser can do anything on the server: a leaked URL exposes all of its databases.",
    "CONNECTION_UNENCRYPTED": "All payloads cross the network in plain text.",
    "CONNECTIONS_LOW": "A node uses up to 20 connections, and waits when none is free.",
    "AUTOVACUUM_OFF": "Tables of live jobs change constantly; without autovacuum they bloat and become slow.",
    "STATEMENT_TIMEOUT_TOO_SHORT": "Retention, audits and migrations run statements of seconds, which are cancelled.",
    "POOLER_WITHOUT_IDLE_LIMIT": "A node that freezes inside a transaction keeps its locks indefinitely.",
    "NOTIFY_NOT_DELIVERED": "Nodes notice new jobs up to 1 s later. Everything else works.",
    "SQLITE_ON_NETWORK": "File locks are unreliable on network file systems, and the database may be corrupted.",
    "SQLITE_NOT_PERSISTENT": "Files in memory or in a container's own layer are lost together with it.",
    "DISK_ALMOST_FULL": "A full disk stops all writes, so nothing fires.",
    "CLOCK_SKEWED": "Jobs fire by the clock of the database, not by the clock of this machine.",
    "ZONE_DATA_DIFFERS": "Nodes with older rules may compute wrong local times.",
    "SECRET_KEYS_DIFFER": "API keys, sessions and secrets of one node are refused or unreadable on another one.",
    "VERSIONS_DIFFER": "Supported during a rolling deploy, but not permanently.",
    "NO_LIVE_NODE": "Pending work is not executed.",
    "OTHER_DATABASE": "Commands with a database URL and requests to that node see different jobs and schedules.",
    "GALERA_SEVERAL_WRITERS": "Galera does not replicate row locks, so limits and the order of jobs may be violated.",
    "HISTORY_REWOUND": "Acknowledged work of that time is missing, and finished work may run again.",
    "ALL_PAUSED": "No occurrence is planned and no job claimed, on any node.",
    "JOBS_UNHANDLED": "These jobs wait until a node handles their topic.",
    "SCHEDULES_ERRORED": "These schedules do not fire until the error is corrected.",
    "TARGETS_DISABLED": "Jobs for these targets fail: their receiver responded with 410 Gone.",
    "BACKLOG_HELD": "Too many occurrences were due after an outage or a restore to run without confirmation.",
    "SECRETS_UNREADABLE": "Targets and sources that use these secrets fail.",
    "SECRET_KEY_MISSING": "The address is reachable from other machines, and API keys and sign-in need a secret key.",
    "SECRETS_FILE_READABLE": "Every user of this machine can read the secrets in this file.",
    "HTTP_WITHOUT_TLS": "API keys and payloads cross the network in plain text.",
    "SIGN_ON_MISCONFIGURED": "A node with these settings does not start.",
    "IDENTITY_PROVIDER_UNAVAILABLE": "Users cannot sign in there, and its tokens are refused.",
    "IDENTITY_PROVIDER_CLOCK_DIFFERS": "Tokens are refused as expired or as not yet valid.",
    "REDIRECT_URI_WITHOUT_TLS": "Providers refuse it, and browsers keep no session without TLS.",
    "METRICS_EXPOSED": "Any client can read the names of topics and queues.",
    "WEBHOOKS_TO_PRIVATE_ADDRESSES": "Clients that may create jobs can call every address this machine can reach.",
    "EXTRA_MISSING": "The feature that needs this extra does not work on this node.",
    "RETENTION_TOO_SHORT": "Audits and the history go back no further than this.",
    "LEASE_TOO_SHORT": "A node that is slow for a moment is considered dead, and its jobs start a second time.",
    "OPEN_FILES_LIMIT_LOW": "Each delivery may open a connection; above the limit, deliveries fail.",
    "APP_NOT_LOADABLE": "A node cannot start with this app.",
    "UNKNOWN_TIMEZONE": "Schedules and local times without their own time zone are refused.",
    "PORT_IN_USE": "A process that serves HTTP cannot start here.",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. `verdict` is ok, warn or fail; `fix`, `code` and `why` are set for warn and fail."""

    verdict: str
    name: str
    detail: str
    fix: str = ""
    code: str = ""
    why: str = ""


def warn(name: str, code: str, detail: str, fix: str) -> Check:
    """Return a warning: it works now, but may fail later."""
    return Check("warn", name, detail, fix, code, REASONS[code])


def fail(name: str, code: str, detail: str, fix: str) -> Check:
    """Return a failure: it does not work."""
    return Check("fail", name, detail, fix, code, REASONS[code])
