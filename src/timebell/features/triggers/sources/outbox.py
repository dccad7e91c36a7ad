"""The outbox of a PostgreSQL source: database triggers record the key of each changed row in a table.

A row of the outbox is written in the transaction of the change, so no change is lost. NOTIFY is sent, too, but only
makes Timebell read the outbox earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from timebell.errors import SourceFailed
from timebell.features.triggers.sources.identifiers import quote_name, quote_table

OUTBOX_TABLE = "timebell_changes"
MAX_NAME_BYTES = 63  # of PostgreSQL, which cuts longer names
READ_QUERY = (
    f"SELECT id, tx, key FROM {OUTBOX_TABLE} WHERE channel = :channel AND (tx, id) > (:tx, :id)"  # noqa: S608 - a constant
    " AND tx < txid_snapshot_xmin(txid_current_snapshot()) ORDER BY tx, id LIMIT :limit"
)
"""Changes in commit order: those of transactions that began before the oldest one that still runs."""
READ_AHEAD_QUERY = (
    f"SELECT id, tx, key FROM {OUTBOX_TABLE} WHERE channel = :channel"  # noqa: S608 - a constant
    " AND tx >= txid_snapshot_xmin(txid_current_snapshot()) AND NOT id = ANY(:known) ORDER BY tx, id LIMIT :limit"
)
"""Other changes, so that a long transaction delays none. They are read again in commit order when it has ended."""
MAX_READ_AHEAD = 10_000
POSITION_QUERY = "SELECT txid_snapshot_xmin(txid_current_snapshot()) - 1 AS tx"


class WatchedTable(NamedTuple):
    """A table whose changes are recorded: the table, and the column with the key of the item."""

    table: str
    key: str


def install_sql(channel: str, tables: Sequence[WatchedTable]) -> str:
    """Return SQL that creates the outbox and the triggers. Running it again has no further effect."""
    parts = [_OUTBOX.format(outbox=OUTBOX_TABLE)]
    for watched in tables:
        name = quote_name("postgresql", _trigger_name(channel, watched))
        key = quote_name("postgresql", watched.key)
        parts.append(_TRIGGER.format(
            outbox=OUTBOX_TABLE, name=name, table=quote_table("postgresql", watched.table), key=key, channel=channel,
        ))  # fmt: skip
    return "\n".join(parts)


def uninstall_sql(channel: str, tables: Sequence[WatchedTable]) -> str:
    """Return SQL that removes the triggers, and the outbox if no other channel uses it."""
    lines = []
    for watched in tables:
        name = quote_name("postgresql", _trigger_name(channel, watched))
        lines += [
            f"DROP TRIGGER IF EXISTS {name} ON {quote_table('postgresql', watched.table)};",
            f"DROP FUNCTION IF EXISTS {name}();",
        ]
    return "\n".join([*lines, _DROP_OUTBOX.format(outbox=OUTBOX_TABLE, channel=channel)])


async def run_sql(url: str, sql: str) -> None:
    """Run SQL in one transaction as the user of the URL. Raises SourceFailed."""
    import asyncpg
    from sqlalchemy import make_url

    place = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        connection = await asyncpg.connect(place, timeout=10)
        try:
            async with connection.transaction():
                await connection.execute(sql)
        finally:
            await connection.close(timeout=5)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise SourceFailed(f"The SQL could not be run: {error}"[:300], fix="Use the owner of the table.") from error


def _trigger_name(channel: str, watched: WatchedTable) -> str:
    name = f"{channel}_{watched.table}_{watched.key}"
    plain = name.replace(".", "_").replace('"', "")
    if plain == name and len(name.encode()) <= MAX_NAME_BYTES:
        return name
    return f"{plain.encode()[: MAX_NAME_BYTES - 9].decode(errors='ignore')}_{sha256(name.encode()).hexdigest()[:8]}"


_OUTBOX = """\
-- Records the keys of changed rows in {outbox}, which Timebell reads. Review it, then run it as the owner.
CREATE TABLE IF NOT EXISTS {outbox} (
    tx bigint NOT NULL DEFAULT txid_current(),
    id bigserial,
    channel text NOT NULL,
    key text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tx, id)
);
CREATE INDEX IF NOT EXISTS {outbox}_at ON {outbox} (at);
"""

_TRIGGER = """\
CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    changed text;
BEGIN
    FOR changed IN
        SELECT DISTINCT k FROM (VALUES
            (CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD.{key}) #>> '{{}}' END),
            (CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW.{key}) #>> '{{}}' END)
        ) AS keys (k) WHERE k IS NOT NULL
    LOOP
        INSERT INTO {outbox} (channel, key) VALUES ('{channel}', changed);
        PERFORM pg_notify('{channel}', left(changed, 200));  -- the length is limited, longer keys are not used
    END LOOP;
    -- Keeps the outbox small: what Timebell has not read for 7 days is found by its next full read.
    DELETE FROM {outbox} WHERE (tx, id) IN (
        SELECT tx, id FROM {outbox} WHERE at < now() - interval '7 days' ORDER BY at LIMIT 10 FOR UPDATE SKIP LOCKED
    );
    RETURN NULL;
END
$$;
DROP TRIGGER IF EXISTS {name} ON {table};
CREATE TRIGGER {name} AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {name}();
"""

_DROP_OUTBOX = """\
DELETE FROM {outbox} WHERE channel = '{channel}';
DO $$ BEGIN
    IF NOT EXISTS (SELECT 1 FROM {outbox}) THEN
        DROP TABLE {outbox};
    END IF;
END $$;
"""
