"""The definition of an audience read from the customer's own database: URL, query and key column. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from timebell.errors import InvalidInput
from timebell.model.target import has_password

URL_SCHEMES = ("postgresql", "postgres", "sqlite", "mysql", "mariadb")
MAX_QUERY_LENGTH = 20_000
_LITERALS_AND_COMMENTS = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|--[^\n]*|/\*.*?\*/", re.DOTALL)
_WRITE_KEYWORDS = re.compile(
    r"\b(insert|update|delete|merge|replace\s+into|truncate|drop|alter|create|grant|revoke|copy|call|do|execute|attach"
    r"|detach|pragma|vacuum|set|lock|into|load_file|load_extension|nextval|setval|pg_\w+|lo_\w+|dblink\w*)\b",
    re.IGNORECASE,
)
_COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AudienceSource:
    """The database, query and key column of an audience.

    `url` is the database URL; or `secret` names the secret that contains it. `query` returns one row per device: a
    column `token`, columns named like the fields of a device, and other columns, which become attributes. `key` is a
    column with unique values; rows are read in its order, so that reading can resume.
    """

    query: str
    key: str
    url: str | None = None
    secret: str | None = None

    @classmethod
    def from_json(cls, spec: Mapping[str, Any]) -> AudienceSource:
        """Parse {"url": "..." or {"secret": "name"}, "query": "SELECT ...", "key": "id"}.

        Raises InvalidInput (INVALID_AUDIENCE, AUDIENCE_KEY_MISSING, AUDIENCE_QUERY_WRITES).
        """
        if spec.keys() - {"url", "query", "key"}:
            raise _invalid("An audience has the fields url, query and key only")
        url, query, key = spec.get("url"), spec.get("query"), spec.get("key")
        secret = url.get("secret") if isinstance(url, Mapping) and url.keys() == {"secret"} else None
        if secret is None:
            _check_url(url)
        elif not isinstance(secret, str) or not secret:
            raise _invalid('url must be like "postgresql://host/name" or {"secret": "its name"}')
        if not isinstance(query, str) or not query.strip() or len(query) > MAX_QUERY_LENGTH or "\0" in query:
            raise _invalid(f"query must be a SELECT of at most {MAX_QUERY_LENGTH:,} characters")
        if not isinstance(key, str) or not _COLUMN_NAME.fullmatch(key):
            raise InvalidInput(
                "An audience needs a key column, by which an interrupted read resumes.", code="AUDIENCE_KEY_MISSING",
                fix='Set "key" to a column of the query with unique values, e.g. "id".',
            )  # fmt: skip
        _check_query(query)
        return cls(query.strip(), key, None if secret else url, secret)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that `from_json` parses."""
        return {"url": self.url if self.secret is None else {"secret": self.secret}, "query": self.query,
                "key": self.key}  # fmt: skip


def _check_url(url: Any) -> None:
    try:
        is_valid = isinstance(url, str) and urlsplit(url).scheme in URL_SCHEMES and urlsplit(url).port != 0
        is_password_exposed = is_valid and has_password(url)
    except ValueError:
        is_valid = is_password_exposed = False
    if not is_valid:
        raise _invalid("url must name a PostgreSQL, MySQL or SQLite database: postgresql://user@host/name")
    if is_password_exposed:
        raise InvalidInput(
            "The url contains a password, which every reader of the audience could see.", code="INVALID_AUDIENCE",
            fix='Store the url in a secret and set url to {"secret": "its name"}.',
        )  # fmt: skip


def _check_query(query: str) -> None:
    bare = _LITERALS_AND_COMMENTS.sub(" ", query).strip()
    if not re.match(r"(?:select|with)\b", bare, re.IGNORECASE) or ";" in bare:
        raise _not_read_only("is not one SELECT")
    if (keyword := _WRITE_KEYWORDS.search(bare)) is not None:
        raise _not_read_only(f"contains {keyword[0]!r}")


def _not_read_only(problem: str) -> InvalidInput:
    return InvalidInput(
        f"The query of an audience must be read-only; this one {problem}.", code="AUDIENCE_QUERY_WRITES",
        fix="Write one SELECT without a final semicolon. Put a column of such a name in double quotes.",
    )  # fmt: skip


def _invalid(problem: str) -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_AUDIENCE", fix="See docs/guides/campaigns.md.")
