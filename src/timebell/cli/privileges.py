"""`timebell db roles`: the least that each kind of process needs in PostgreSQL, as statements to run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from timebell.cli.output import OK, show
from timebell.errors import InvalidInput
from timebell.store.open import VERSION_TABLE
from timebell.store.schema import metadata

# Whose rows nobody changes once they are written.
APPEND_ONLY = {"timebell_audit_log"}
# Who somebody is, and what is secret; answers hold whole bodies.
CREDENTIALS = {
    "timebell_keys", "timebell_users", "timebell_sessions", "timebell_secrets", "timebell_data_keys",
    "timebell_connections", "timebell_answers",
}  # fmt: skip
# What an engine keeps for itself.
OF_ENGINES = {"timebell_nodes", "timebell_leases", "timebell_zone_changes", "timebell_usage"}
# Named targets and sources hold secrets, encrypted; a client looks up which kind a target is.
SEALED = {"timebell_sources"}
FINISHED = "timebell_finished"
ALL = "SELECT, INSERT, UPDATE, DELETE"


def print_roles(prefix: str) -> int:
    """Print the statements; the exit code. Raises InvalidInput (INVALID_NAME)."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", prefix):
        raise InvalidInput(
            f"{prefix!r:.60} cannot begin a role's name.", code="INVALID_NAME", fix="Small letters, digits and _."
        )
    show("\n".join(statements(prefix)))
    return OK


def statements(prefix: str) -> Iterator[str]:
    """In the order to run them in, as whoever owns the tables; again after each `timebell db upgrade`."""
    node, client, reader = f"{prefix}_node", f"{prefix}_client", f"{prefix}_reader"
    yield "-- Run as the owner of the tables (who runs timebell db upgrade), again after each upgrade. Safe to repeat."
    yield "BEGIN;"
    for role in (node, client, reader):
        yield (  # the prefix was checked
            f"DO $$ BEGIN IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = '{role}')"  # noqa: S608
            f" THEN CREATE ROLE {role} LOGIN; END IF; END $$;"
        )
        yield f"GRANT USAGE ON SCHEMA public TO {role};"
        yield f"GRANT SELECT ON {VERSION_TABLE} TO {role};"
        yield f"ALTER ROLE {role} SET idle_in_transaction_session_timeout = '10s';"
        yield f"ALTER ROLE {role} SET jit = off;"
    yield "-- Nodes (planner, worker, API and dashboard are one process): all but changing the audit log."
    for table in sorted(metadata.tables):
        yield f"GRANT {'SELECT, INSERT' if table in APPEND_ONLY else ALL} ON {table} TO {node};"
    yield "-- They make and drop the weeks of what is finished, which takes its owner."
    yield f"GRANT {node} TO CURRENT_USER;"
    yield f"GRANT CREATE ON SCHEMA public TO {node};"
    yield (
        "DO $$ DECLARE part regclass; BEGIN FOR part IN SELECT relid FROM"  # noqa: S608 - as above
        f" pg_partition_tree('{FINISHED}') LOOP EXECUTE format('ALTER TABLE %s OWNER TO {node}', part);"
        " END LOOP; END $$;"
    )
    yield "-- Programs that make, look up, move and cancel work, and run no engine: no credentials, no engine's own."
    for table in sorted(metadata.tables.keys() - CREDENTIALS - SEALED - APPEND_ONLY):
        yield f"GRANT {'SELECT' if table in OF_ENGINES else ALL} ON {table} TO {client};"
    yield "-- timebell audit, why, watch and doctor: reads, and no credentials."
    for table in sorted(metadata.tables.keys() - CREDENTIALS - SEALED):
        yield f"GRANT SELECT ON {table} TO {reader};"
    yield f"ALTER ROLE {reader} SET default_transaction_read_only = on;"
    yield "COMMIT;"
