"""Pages for who operates all of it: several schedules at once, nodes and who led, months of tenants."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import event, insert

from tests.api.web import NIGHTLY
from timebell.ids import new_id
from timebell.model.billing_months import first_of, month_of
from timebell.model.routes import Routes
from timebell.store.audit import overview
from timebell.store.cluster import nodes
from timebell.store.transaction import Transaction
from timebell.store.triggers.tables import months

from .browsing import Browser
from .test_job_pages import ended, write

Make = Callable[..., Any]


async def test_several_schedules_at_once_are_counted_first_and_each_is_done_by_itself(make_light: Make) -> None:
    async with make_light(open_here=True) as browser:
        made = [
            (await browser.web.post("/api/v1/schedules", {**NIGHTLY, "name": f"many-{n}"})).json() for n in range(3)
        ]
        chosen = {f"one-{one['id']}": str(one["revision"]) for one in made}
        action = "/ui/schedules/several"
        assert (await browser.press("/ui/schedules", action, what="pause")).status_code == 400
        asked = await browser.press("/ui/schedules", action, what="pause", **chosen)
        assert "Pause 3 schedules?" in asked.text
        assert "many-0, many-1, many-2" in asked.text
        assert all([(await _one(browser, one))["enabled"] for one in made])
        await browser.press("/ui/schedules", action, what="pause", sure="1", reason="night work", **chosen)
        assert [(await _one(browser, one))["pauseReason"] for one in made] == ["night work"] * 3
        await browser.press("/ui/schedules", action, what="resume", sure="1", **chosen)
        assert all([(await _one(browser, one))["enabled"] for one in made])
        # One was changed since it was looked at: it stays, and is named.
        path = f"/api/v1/schedules/{made[1]['id']}"
        await browser.web.ask("PATCH", path, {"timezone": "Europe/Paris"}, if_match="*")
        chosen = {f"one-{one['id']}": str((await _one(browser, one))["revision"]) for one in made}
        chosen[f"one-{made[1]['id']}"] = "1"
        some = await browser.press("/ui/schedules", action, what="delete", sure="1", **chosen)
        assert "Deleted 2 of 3" in some.text
        assert made[1]["id"] in some.text
        assert [one["name"] for one in (await browser.web.get("/api/v1/schedules")).json()["items"]] == ["many-1"]
        await browser.user("vera", "viewer")
        await browser.sign_in("vera")
        assert "several" not in (await browser.look("/ui/schedules")).text


async def _one(browser: Browser, of: dict[str, Any]) -> dict[str, Any]:
    return (await browser.web.get(f"/api/v1/schedules/{of['id']}")).json()  # type: ignore[no-any-return]


async def test_nodes_say_how_much_they_run_and_who_led_when(make: Make) -> None:
    async with make(open_here=True) as browser:
        app = browser.app
        await app.open()
        began = app.clock.now() - timedelta(hours=1)

        def lead(tx: Transaction) -> None:
            for n, (name, heard) in enumerate((("alpha", 60), ("beta", 900))):
                routes, at = Routes(everything=True), began + timedelta(seconds=600 * n)
                id_ = new_id(at)
                seen = began + timedelta(seconds=heard)
                ran = {"slots": 16, "running": 6 + n, "clock_ahead": 4}
                nodes.announce(tx, nodes.Node(id_, name, "1", "2026a", routes, 0, began, seen, **ran))
                assert nodes.take_lease(tx, id_, nodes.lease(tx), at) is not None
                if n:
                    nodes.forget(tx, [id_], began + timedelta(seconds=1200))

        await app.store.run(lead)
        text = re.sub(r"<[^>]+>", " ", (await browser.look("/ui/nodes")).text)
        for word in ("6 of 16 slots", "+4 ms", "beta took the lease", "No leader for 9 min", "alpha took the lease",
                     "alpha was not heard from any more", "beta left", "nobody has led since"):  # fmt: skip
            assert word in text, word


async def test_tenants_months_are_shown(make_light: Make) -> None:
    async with make_light(open_here=True) as browser:
        body = {"id": "acme", "limits": {"jobsPerMonth": 500}, "timezone": "Asia/Seoul"}
        assert (await browser.web.post("/api/v1/tenants", body)).status_code == 201
        await browser.web.post("/api/v1/tenants", {"id": "small", "limits": {"jobsPerMonth": 100}})
        now = browser.app.clock.now()
        used = [{"tenant_id": "acme", "month": month_of(now, "Asia/Seoul"), "used": 480},
                {"tenant_id": "small", "month": month_of(now, None), "used": 100}]  # fmt: skip
        await browser.app.store.run(lambda tx: tx.execute(insert(months), used))
        text = re.sub(r"<[^>]+>", " ", (await browser.look("/ui/tenants")).text)
        for word in ("480 of 500", "96 % used", "00:00 KST", "100 of 100", "Used up"):
            assert word in text, word
        # What the month had no room for; what was skipped before it, or for another reason, is none of it.
        began = first_of(now, "Asia/Seoul")
        skips = ((began - timedelta(seconds=1), "quota"), (now, "quota"), (now, "quota"), (now, "overlap"))
        await write(browser, *(ended(at, "skipped", tenant_id="acme", reason=reason) for at, reason in skips))
        found = (await browser.look("/ui/tenants")).text
        row = found.split('tenant=acme"')[1].split("</tr>")[0]
        assert re.findall(r'<td class="num" data-label="Skipped by quota">(\S+)</td>', row)[0] == "2"
        told = re.sub(r"<[^>]+>", "", (await browser.look("/ui/?tenant=acme")).text)
        assert re.search(r"480 of the 500 jobs of this month are used: it begins anew \w+ 01 \w+.*?, 00:00 KST", told)


async def test_tenants_are_shown_whatever_their_names(make_light: Make) -> None:
    async with make_light(open_here=True) as browser:
        assert (await browser.web.post("/api/v1/tenants", {"id": "ana@acme.com"})).status_code == 201
        await browser.app.schedule_at("mail.send", "2198-01-01T00:00", timezone="UTC", tenant_id="acme/eu west")
        page = await browser.look("/ui/tenants")
        assert page.status_code == 200
        assert "ana@acme.com" in page.text


async def test_the_last_hour_is_looked_up_by_its_time_whatever_a_tenant_did_before(make: Make) -> None:
    async with make() as browser:
        app = browser.app
        await app.open()
        now = app.clock.now()
        asked: list[tuple[str, Any]] = []
        unsought = re.compile(r"\+timebell_finished\.tenant_id|timebell_finished\.tenant_id \|\| ''")

        def look(tx: Transaction) -> list[list[str]]:
            connection = tx.connection  # type: ignore[attr-defined]
            event.listen(connection, "before_cursor_execute", lambda *given: asked.append((given[2], given[3])))
            overview.signals(tx, "default", now, 60.0)
            overview.ended_within(tx, "default", now - timedelta(hours=1), now)
            about, explain = [one for one in asked if unsought.search(one[0])], "EXPLAIN QUERY PLAN"
            if tx.dialect.name.startswith("postgresql"):
                connection.exec_driver_sql("SET LOCAL enable_seqscan = off")  # there are hardly any rows
                explain = "EXPLAIN"
            plans = [connection.exec_driver_sql(f"{explain} {sql}", given) for sql, given in about]
            return [[str(row[-1]) for row in plan] for plan in plans]

        plans = await app.store.run(look)
        assert len(plans) == 2
        for plan in plans:
            sought = [line for line in plan if "Index Cond" in line or "USING INDEX" in line]
            assert sought, plan
            assert all("finished_at" in line and "tenant_id" not in line for line in sought), plan


async def test_what_comes_is_shown_for_a_day_or_a_week(make: Make) -> None:
    async with make(open_here=True) as browser:
        soon, late = browser.app.clock.now() + timedelta(hours=5), browser.app.clock.now() + timedelta(days=5)
        for name, at in (("to-day", soon), ("later-on", late), ("every-minute", None)):
            when = {"cronExpression": "* * * * *" if at is None else f"{at.minute} {at.hour} {at.day} {at.month} *"}
            made = {**NIGHTLY, "name": name, "timezone": "UTC", **when}
            assert (await browser.web.post("/api/v1/schedules", made)).status_code == 201
        day, week = (await browser.look("/ui/")).text, (await browser.look("/ui/?days=7")).text
        assert "Next 24 hours" in day
        assert "later-on" not in day
        assert "Next 7 days" in week
        assert [week.count(f"<title>{name} · ") for name in ("to-day", "later-on", "every-minute")] == [1, 1, 0]
        (at,) = [float(x) for x in re.findall(r'cx="([\d.]+)" cy="\d+" r="4.5"><title>later-on', week)]
        assert 190 + 960 * 4.9 / 7 < at < 190 + 960 * 5 / 7
        assert len(re.findall(r'text-anchor="middle">\w{3} \d\d<', week)) == 7
