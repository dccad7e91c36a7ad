"""API keys over HTTP: returned once, never more powerful than their creator, refused when revoked."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import select

from timebell.store.schema import answers, keys
from timebell.store.transaction import Transaction

from .web import NIGHTLY, is_problem

Make = Callable[..., Any]


def _dump(tx: Transaction) -> str:
    return str([list(tx.execute(select(table)).all()) for table in (keys, answers)])


async def test_the_format_of_a_key(make: Make) -> None:
    async with make() as web:
        created = (await web.post("/keys", {"name": "ci", "role": "editor"})).json()
        assert re.fullmatch(r"tb_live_[0-9a-f]{12}_[0-9a-f]{48}[0-9a-f]{8}", created["key"])
        assert created["key"].split("_")[2] == created["id"]
        assert f"{zlib.crc32(created['key'][:-8].encode()):08x}" == created["key"][-8:]


async def test_a_key_is_returned_once_and_never_stored(make: Make) -> None:
    async with make() as web:
        body = {"name": "ci", "role": "editor"}
        first = await web.post("/keys", body, idempotency_key="k")
        again = await web.post("/keys", body, idempotency_key="k")
        created = first.json()
        assert (first.status_code, again.status_code) == (201, 201)
        assert again.json() == {**created, "key": None}
        assert again.headers["location"] == f"/api/v1/keys/{created['id']}"
        for path in ("/keys", f"/keys/{created['id']}"):
            assert "key" not in (await web.get(path)).json()
        secret = created["key"].split("_")[3]
        assert secret not in await web.app.store.run(_dump)
        assert secret[:40] not in await web.app.store.run(_dump)


async def test_the_limits_of_a_key_hold_and_its_use_is_recorded(make: Make) -> None:
    async with make(open_here=False) as web:
        admin = await web.key("admin")
        end = (web.app.clock.now() + timedelta(days=1)).isoformat().replace("+00:00", "Z")
        limits = {"scopes": ["jobs", "schedules"], "networks": ["127.0.0.0/8"], "expiresAt": end}
        created = (await web.post("/keys", {"name": "ci", "role": "viewer", **limits}, key=admin)).json()
        assert {name: created[name] for name in limits} == limits
        assert (created["role"], created["tenantId"], created["lastUsedAt"]) == ("viewer", "default", None)
        assert (await web.get("/schedules", key=created["key"])).status_code == 200
        is_problem(await web.get("/tenants", key=created["key"]), 403, "ROLE_TOO_LOW")
        is_problem(await web.post("/schedules", NIGHTLY, key=created["key"]), 403, "ROLE_TOO_LOW")
        assert (await web.get(f"/keys/{created['id']}", key=admin)).json()["lastUsedAt"] is not None
        narrow = {"name": "n", "role": "admin", "scopes": ["jobs"]}
        narrow = (await web.post("/keys", narrow, key=admin)).json()
        is_problem(await web.get("/schedules", key=narrow["key"]), 403, "SCOPE_MISSING")


async def test_a_key_cannot_create_a_more_powerful_key(make: Make) -> None:
    async with make(open_here=False) as web:
        now = web.app.clock.now()
        soon, late = ((now + timedelta(hours=hours)).isoformat().replace("+00:00", "Z") for hours in (1, 99))
        limited = await web.key("admin", scopes=("keys", "jobs"), networks=("127.0.0.0/8",),
                                expires_at=now + timedelta(hours=2))  # fmt: skip
        for more in (
            {"role": "platform"}, {"scopes": ["schedules"]}, {"networks": ["10.0.0.0/8"]}, {"networks": ["::/0"]},
            {"expiresAt": late},
        ):  # fmt: skip
            is_problem(
                await web.post("/keys", {"name": "x", "role": "admin", **more}, key=limited), 403, "KEY_EXCEEDS_CALLER"
            )
        same = (await web.post("/keys", {"name": "x", "role": "admin"}, key=limited)).json()
        assert (same["scopes"], same["networks"]) == (["keys", "jobs"], ["127.0.0.0/8"])
        assert same["expiresAt"] is not None
        less = {"name": "x", "role": "viewer", "scopes": ["jobs"], "networks": ["127.0.0.1/32"], "expiresAt": soon}
        assert (await web.post("/keys", less, key=limited)).status_code == 201
        is_problem(
            await web.post("/keys", {"name": "x", "role": "viewer"}, key=await web.key("editor")), 403, "ROLE_TOO_LOW"
        )
        everywhere = await web.key("platform", None)
        created = (await web.post("/keys", {"name": "p", "role": "platform"}, key=everywhere)).json()
        assert created["tenantId"] is None
        theirs = await web.post("/keys", {"name": "a", "role": "admin"}, key=everywhere, timebell_tenant="acme")
        assert theirs.json()["tenantId"] == "acme"


async def test_an_admin_lists_and_revokes_only_keys_of_its_tenant(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, theirs, everywhere = (
            await web.key("admin", "ours"),
            await web.key("admin", "theirs"),
            await web.key("platform", None),
        )
        names = {item["tenantId"] for item in (await web.get("/keys", key=ours)).json()["items"]}
        assert names == {"ours"}
        assert {item["tenantId"] for item in (await web.get("/keys", key=everywhere)).json()["items"]} == {
            "ours",
            "theirs",
            None,
        }
        assert len((await web.get("/keys?tenant=theirs", key=everywhere)).json()["items"]) == 1
        for key in (theirs, everywhere):
            id_ = key.split("_")[2]
            is_problem(await web.get(f"/keys/{id_}", key=ours), 404, "KEY_NOT_FOUND")
            is_problem(await web.ask("DELETE", f"/keys/{id_}", key=ours), 404, "KEY_NOT_FOUND")
        id_ = theirs.split("_")[2]
        revoked = (await web.ask("DELETE", f"/keys/{id_}", key=everywhere)).json()
        assert revoked["revokedAt"] is not None
        assert (await web.ask("DELETE", f"/keys/{id_}", key=everywhere)).json() == revoked


async def test_keys_are_paged(make: Make) -> None:
    async with make() as web:
        created = {(await web.post("/keys", {"name": "k", "role": "viewer"})).json()["id"] for _ in range(5)}
        seen: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = (await web.get(f"/keys?limit=2{cursor and '&cursor=' + cursor}")).json()
            seen += [item["id"] for item in page["items"]]
            cursor = page["nextCursor"]
        assert seen == sorted(created)


async def test_invalid_keys_are_refused(make: Make) -> None:
    async with make() as web:
        for wrong, code in (
            ({"role": "god"}, "INVALID_FIELDS"), ({"scopes": ["everything"]}, "INVALID_SCOPES"),
            ({"networks": ["300.1.1.1"]}, "INVALID_NETWORKS"), ({"tenantId": "other"}, "UNKNOWN_FIELD"),
            ({"expiresAt": "2040-01-01T00:00:00"}, "INVALID_INSTANT"), ({"id": "x"}, "UNKNOWN_FIELD"),
        ):  # fmt: skip
            is_problem(await web.post("/keys", {"name": "x", "role": "viewer", **wrong}), 422, code)
        past = {"name": "x", "role": "viewer", "expiresAt": "2020-01-01T00:00:00Z"}
        is_problem(await web.post("/keys", past), 400, "SCHEDULE_IN_THE_PAST")
        assert (await web.get("/keys")).json()["items"] == []
