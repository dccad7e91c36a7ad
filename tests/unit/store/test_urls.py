"""Database URLs of several hosts."""

from __future__ import annotations

import pytest

from timebell.errors import InvalidInput
from timebell.store.open import parse_url, server_addresses
from timebell.store.urls import parse_database_url, split_hosts


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("postgresql://u@h:4/db", [("h", 4)]),
        ("postgresql://u@h/db", [("h", 5432)]),
        ("postgresql://u:p%40w@h1:1,h2:2/db?target_session_attrs=primary", [("h1", 1), ("h2", 2)]),
        ("postgresql://h1,h2:2/db", [("h1", 5432), ("h2", 2)]),
        ("postgresql://u@[::1]:5,[::2]/db", [("::1", 5), ("::2", 5432)]),
        ("postgresql://u@/db?host=a:1&host=b:2", [("a", 1), ("b", 2)]),
        ("postgresql://u@/db?host=a,b&port=7", [("a", 7), ("b", 7)]),
    ],
)
def test_a_url_lists_its_hosts_in_their_order(url: str, addresses: list[tuple[str, int]]) -> None:
    assert split_hosts(parse_database_url(url), 5432) == addresses
    assert server_addresses(url) == addresses


def test_a_url_of_several_hosts_keeps_everything_else() -> None:
    parsed = parse_database_url("mariadb://u:p%40w@a:1,b:2/db?charset=utf8mb4")
    assert (parsed.username, parsed.password, parsed.database) == ("u", "p@w", "db")
    assert parsed.query["charset"] == "utf8mb4"
    assert "p%40w" not in parsed.render_as_string()
    assert server_addresses("mariadb://u@a,b:2/db") == [("a", 3306), ("b", 2)]


@pytest.mark.parametrize("url", ["postgresql://a:x,b:2/db", "postgresql://a:1,b:0/db", "mariadb://a:1,b:99999/db"])
def test_an_invalid_port_of_one_host_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_url(url)
    assert refused.value.code == "INVALID_DATABASE_URL"
