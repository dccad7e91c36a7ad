"""An audience that is read from a database of the customer's own: which one, by what query, in what order. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from timebell.errors import InvalidInput

KINDS = ("postgresql", "postgres", "sqlite", "mysql", "mariadb")
LONGEST = 20_000
_QUIET = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|--[^\n]*|/\*.*?\*/", re.DOTALL)
_WRITES = re.compile(
    r"\b(insert|update|delete|merge|replace\s+into|truncate|drop|alter|create|grant|revoke|copy|call|do|execute|attach"
    r"|detach|pragma|vacuum|set|lock|into|load_file|load_extension|nextval|setval|pg_\w+|lo_\w+|dblink\w*)\b",
    re.IGNORECASE,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """`url` of the database, or the name of the secret that it is in. `query` gives a row for each device: a column
    `token`, columns named as the fields of a device, and others, which become attributes. `key` is the column that no
    two rows share and that they are read in the order of."""

    query: str
    key: str
    url: str | None = None
    secret: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Source:
        """From JSON: {"url": "..." or {"secret": "name"}, "query", "key"}. Raises InvalidInput (AUDIENCE_INVALID,
        AUDIENCE_KEY_MISSING, AUDIENCE_QUERY_WRITES)."""
        if given.keys() - {"url", "query", "key"}:
            raise _unfit("An audience has url, query and key")
        url, query, key = given.get("url"), given.get("query"), given.get("key")
        secret = url.get("secret") if isinstance(url, Mapping) and url.keys() == {"secret"} else None
        if secret is None:
            _check_url(url)
        elif not isinstance(secret, str) or not secret:
            raise _unfit('url is "postgresql://host/name" or {"secret": "the name of one"}')
        if not isinstance(query, str) or not query.strip() or len(query) > LONGEST or "\0" in query:
            raise _unfit(f"query is a SELECT, of at most {LONGEST:,} characters")
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise InvalidInput(
                "Without a key nobody can say where the reading of an audience goes on.", code="AUDIENCE_KEY_MISSING",
                fix='Give "key": the name of a column of the query that no two rows share, e.g. "id".',
            )  # fmt: skip
        _check_query(query)
        return cls(query.strip(), key, None if secret else url, secret)

    def json(self) -> dict[str, Any]:
        """As `read` takes it."""
        return {"url": self.url if self.secret is None else {"secret": self.secret}, "query": self.query,
                "key": self.key}  # fmt: skip


def has_password(url: str) -> bool:
    """Whether a URL has a password in it, however drivers take it. Raises ValueError for what is none."""
    parts = urlsplit(url)
    return bool(parts.password) or not {"password", "passwd"}.isdisjoint(parse_qs(parts.query))


def _check_url(url: Any) -> None:
    try:
        known = isinstance(url, str) and urlsplit(url).scheme in KINDS and urlsplit(url).port != 0
        hidden = known and has_password(url)
    except ValueError:
        known = hidden = False
    if not known:
        raise _unfit("url is that of a PostgreSQL, MySQL or SQLite database: postgresql://user@host/name")
    if hidden:
        raise InvalidInput(
            "The url has a password in it, which everybody who reads the audience would see.", code="AUDIENCE_INVALID",
            fix='Put the url into a secret, and give {"secret": "its name"}.',
        )  # fmt: skip


def _check_query(query: str) -> None:
    bare = _QUIET.sub(" ", query).strip()
    if not re.match(r"(?:select|with)\b", bare, re.IGNORECASE) or ";" in bare:
        raise _writes("is not one SELECT")
    if (found := _WRITES.search(bare)) is not None:
        raise _writes(f"has the word {found[0]!r}")


def _writes(why: str) -> InvalidInput:
    return InvalidInput(
        f"The query of an audience only reads, and this one {why}.", code="AUDIENCE_QUERY_WRITES",
        fix="Write one SELECT without ; at its end. A column that is named like this goes in double quotes.",
    )  # fmt: skip


def _unfit(why: str) -> InvalidInput:
    return InvalidInput(f"{why}.", code="AUDIENCE_INVALID", fix="See docs/guides/campaigns.md.")
