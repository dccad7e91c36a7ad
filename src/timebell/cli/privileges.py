"""`timebell db roles`: SQL statements that create PostgreSQL roles with the least privileges per kind of process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from timebell import settings
from timebell.cli.output import OK, print_data
from timebell.errors import InvalidInput
from timebell.feature import Feature
from timebell.store.metadata import CREDENTIALS, load_tables
from timebell.store.open import parse_url
from timebell.store.version import VERSION_TABLE

# Rows are never changed after the insert.
APPEND_ONLY_TABLES = {"timebell_audit_log"}
# Credentials, sessions and secrets; idempotency keys contain whole response bodies.
CREDENTIAL_TABLES = {
    "timebell_keys", "timebell_users", "timebell_sessions", "timebell_sign_in_failures", "timebell_secrets",
    "timebell_data_keys", "timebell_idempotency_keys",
}  # fmt: skip
# Written only by engines.
ENGINE_TABLES = {"timebell_nodes", "timebell_leases", "timebell_zone_changes", "timebell_usage"}
# Sources contain encrypted secrets. Targets do too, but clients must look up the kind of a named target.
ENCRYPTED_TABLES = {"timebell_sources"}
FINISHED_TABLE = "timebell_finished"
ALL_PRIVILEGES = "SELECT, INSERT, UPDATE, DELETE"


def print_roles(prefix: str, features: Iterable[Feature]) -> int:
    """Print the statements for roles `<prefix>_node`, `_client` and `_reader`; return the exit code.

    They cover the tables of the core and of `features`, in the schema of the settings.

    Raises InvalidInput (INVALID_NAME).
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", prefix):
        raise InvalidInput(
            f"{prefix!r:.60} is not a valid prefix of role names.",
            code="INVALID_NAME",
            fix="Use lower-case letters, digits and _, beginning with a letter.",
        )
    schema = str(parse_url(settings.load().database_url).query.get("schema", "public"))
    print_data("\n".join(grant_statements(prefix, features, schema)))
    return OK


def grant_statements(prefix: str, features: Iterable[Feature], schema: str) -> Iterator[str]:
    """Yield the statements in order; the owner of the tables runs them, again after each `timebell db upgrade`."""
    tables = load_tables(features).tables
    credential_tables = CREDENTIAL_TABLES | {name for name, table in tables.items() if table.info == CREDENTIALS}
    node, client, reader = f"{prefix}_node", f"{prefix}_client", f"{prefix}_reader"
    yield "-- Run as the owner of the tables (the role that runs timebell db upgrade), again after each upgrade."
    yield "-- Safe to repeat."
    yield "BEGIN;"
    yield f"SET LOCAL search_path = {schema};"
    for role in (node, client, reader):
        yield (  # safe: print_roles validated the prefix
            f"DO $$ BEGIN IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = '{role}')"  # noqa: S608
            f" THEN CREATE ROLE {role} LOGIN; END IF; END $$;"
        )
        yield f"GRANT USAGE ON SCHEMA {schema} TO {role};"
        yield f"GRANT SELECT ON {VERSION_TABLE} TO {role};"
        yield f"ALTER ROLE {role} SET idle_in_transaction_session_timeout = '10s';"
        yield f"ALTER ROLE {role} SET jit = off;"
    yield "-- Nodes (planner, worker, API and dashboard are one process): everything except changes to the audit log."
    for table in sorted(tables):
        yield f"GRANT {'SELECT, INSERT' if table in APPEND_ONLY_TABLES else ALL_PRIVILEGES} ON {table} TO {node};"
    yield "-- Nodes create and drop weekly partitions of finished jobs, which requires ownership of that table."
    yield f"GRANT {node} TO CURRENT_USER;"
    yield f"GRANT CREATE ON SCHEMA {schema} TO {node};"
    yield (
        "DO $$ DECLARE part regclass; BEGIN FOR part IN SELECT relid FROM"  # noqa: S608 - no user input
        f" pg_partition_tree('{FINISHED_TABLE}') LOOP EXECUTE format('ALTER TABLE %s OWNER TO {node}', part);"
        " END LOOP; END $$;"
    )
    yield "-- Clients that create, read, move and cancel work without an engine: no credentials, no engine tables."
    for table in sorted(tables.keys() - credential_tables - ENCRYPTED_TABLES - APPEND_ONLY_TABLES):
        yield f"GRANT {'SELECT' if table in ENGINE_TABLES else ALL_PRIVILEGES} ON {table} TO {client};"
    yield "-- timebell audit, why, watch and doctor: read-only, no credentials."
    for table in sorted(tables.keys() - credential_tables - ENCRYPTED_TABLES):
        yield f"GRANT SELECT ON {table} TO {reader};"
    yield f"ALTER ROLE {reader} SET default_transaction_read_only = on;"
    yield "COMMIT;"
