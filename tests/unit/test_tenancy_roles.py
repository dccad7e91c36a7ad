"""Roles: each includes the permissions of those below it."""

from __future__ import annotations

from itertools import product

import pytest

from timebell.errors import Refused
from timebell.tenancy.roles import Role, require

ASCENDING = ["viewer", "operator", "editor", "admin", "platform"]


@pytest.mark.parametrize(("role", "needed"), list(product(ASCENDING, ASCENDING)))
def test_a_role_covers_itself_and_those_below(role: str, needed: str) -> None:
    assert Role(role).covers(Role(needed)) is (ASCENDING.index(role) >= ASCENDING.index(needed))


def test_a_role_that_is_too_low_is_refused() -> None:
    require(Role.EDITOR, Role.EDITOR)
    with pytest.raises(Refused, match=r"^This requires the role admin; yours is editor\. Ask an admin") as refused:
        require(Role.EDITOR, Role.ADMIN)
    assert refused.value.code == "ROLE_TOO_LOW"
