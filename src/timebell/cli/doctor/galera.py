"""Check of `timebell doctor` on a Galera cluster: all processes must write to the same member."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text

from timebell.cli.doctor.findings import Check, warn
from timebell.clock import system_now
from timebell.errors import StoreError
from timebell.store.dialects.base import Store
from timebell.store.open import open_store, server_addresses
from timebell.store.transaction import Transaction
from timebell.store.urls import parse_database_url

# Sessions that were idle for longer may be left from before a failover: a node uses its own every few seconds.
SESSIONS = "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = DATABASE() AND TIME < 60"


@dataclass(frozen=True, slots=True)
class MemberSessions:
    """The recently used sessions on this database at one member; `own` is the id of the session that read them."""

    member: str
    own: int
    sessions: frozenset[int]


async def check_galera(store: Store) -> list[Check]:
    """Check the members of a Galera cluster that the database URL lists; return [] for any other server."""
    if not await store.run(_is_member):
        return []
    connected = await store.run(_read_sessions)
    addresses = server_addresses(store.url)
    written = []
    for host, port in addresses:
        url = parse_database_url(store.url).set(host=host, port=port, query={})
        member = open_store(url.render_as_string(hide_password=False), system_now)
        try:
            found = await member.run(_read_sessions)
        except StoreError:  # it is down, or reachable only from the other members
            continue
        finally:
            await member.close()
        own = {found.own, connected.own} if found.member == connected.member else {found.own}
        if found.sessions - own:
            written.append(f"{host}:{port}")
    return [check_writers(len(addresses), written)]


def check_writers(member_count: int, written: list[str]) -> Check:
    """Check that clients use only one member."""
    detail = f"{member_count} members; sessions on {', '.join(written) or 'none'}"
    if len(written) < 2:
        return Check("ok", "galera", detail)
    return warn("galera", "GALERA_SEVERAL_WRITERS", detail,
                "List the members in the same order in TIMEBELL_DATABASE_URL of all processes.")  # fmt: skip


def _is_member(tx: Transaction) -> bool:
    variable = tx.execute(text("SHOW GLOBAL VARIABLES LIKE 'wsrep_on'")).mappings().first()
    return variable is not None and variable["Value"] == "ON"


def _read_sessions(tx: Transaction) -> MemberSessions:
    member = tx.execute(text("SELECT CONCAT(@@hostname, '/', @@port)")).scalar_one()
    own = tx.execute(text("SELECT CONNECTION_ID()")).scalar_one()
    return MemberSessions(member, own, frozenset(tx.execute(text(SESSIONS)).scalars()))
