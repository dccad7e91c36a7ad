"""Database URLs of several hosts."""

from __future__ import annotations

import pytest

from timebell.errors import InvalidInput
from timebell.store.dialects.postgres.server import PostgresServer
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


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@h/db?sslmode=verify-full&sslrootcert=ca.pem&connect_timeout=3&application_name=shop",
        "postgresql://u@h/db?options=-c%20search_path%3Dshop&schema=bell",
        "mariadb://u@h/db?charset=utf8mb4&ssl_ca=ca.pem",
    ],
)
def test_options_of_the_drivers_are_accepted(url: str) -> None:
    parse_url(url)


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("postgresql://u@h/db?channel_binding=require", "Remove it. Supported are: application_name, "),
        ("postgresql://u@h/db?work_mem=16MB", "options=-c%20work_mem%3Dvalue"),
        ("postgresql://u@h/db?connect_timeout=soon", "connect_timeout=5"),
        ("postgresql://u@h/db?schema=Bell", "lower-case letters"),
        ("postgresql://u@h/db?schema=pg_bell", "not with pg_"),
        ("mariadb://u@h/db?autocommit=1", "Supported are: "),
        ("sqlite:///a.db?mode=ro", "has no options"),
    ],
)
def test_other_options_are_refused_with_a_fix(url: str, fix: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_url(url)
    assert refused.value.code == "INVALID_DATABASE_URL"
    assert fix in refused.value.fix


def test_options_reach_both_drivers() -> None:
    server = PostgresServer("postgresql://u@h/db?connect_timeout=3&application_name=shop&options=-c%20work_mem%3D16MB")
    arguments = server.libpq_arguments()
    assert (arguments["connect_timeout"], arguments["options"]) == (3, "-c work_mem=16MB")
    assert server.application_name == "shop"
