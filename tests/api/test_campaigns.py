"""Devices, audiences and campaigns over HTTP; nothing is sent."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from timebell.features.campaigns.client import delivery_export
from timebell.features.campaigns.engine import external_audience
from timebell.features.campaigns.store import chunk_results, chunks, progress
from timebell.features.campaigns.store.chunk_results import DeliveryResult

from .web import Web, is_problem

PHONE = {
    "token": "phone-of-ann-0001", "userId": "ann", "platform": "ios", "gender": "F", "age": 31,
    "timezone": "Asia/Seoul", "pushOnOff": "Y", "marketingOnOff": True,
    "topics": ["news"], "attributes": {"tier": "gold", "visits": 3},
}  # fmt: skip
READING = {
    "title": "Today's reading", "content": "Psalm 22", "sendAt": "2030-03-01T16:15:00", "timezone": "Asia/Seoul",
    "data": {"division": "bible", "version": 0, "bible_code": 3, "landing_url": None},
    "fields": {"rename": {"bible_code": "bibleCode", "landing_url": "landingUrl"}},
    "filters": {"gender": "F", "marketingOnOff": "Y", "platform": None},
}  # fmt: skip


async def register_devices(web: Web, *more: dict[str, Any]) -> None:
    for each in (PHONE, *more):
        answer = await web.post("/devices", each)
        assert answer.status_code == 201, answer.text


async def test_a_device_is_registered_changed_refreshed_and_deleted(make: Callable[..., Any]) -> None:
    async with make() as web:
        first = (await web.post("/devices", PHONE)).json()
        assert {name: first[name] for name in ("userId", "age", "marketingOnOff", "topics", "attributes")} == {
            "userId": "ann", "age": 31, "marketingOnOff": True, "topics": ["news"],
            "attributes": {"tier": "gold", "visits": 3},
        }  # fmt: skip
        again = (await web.post("/devices", {"token": PHONE["token"], "age": 32, "marketingOnOff": "N"})).json()
        seen_at = again["lastSeenAt"]
        assert seen_at > first["lastSeenAt"]
        # Absent fields are unchanged.
        assert again == {**first, "age": 32, "marketingOnOff": False, "lastSeenAt": seen_at}
        new = (await web.post("/devices/refresh", {"oldToken": PHONE["token"], "token": "phone-of-ann-0002"})).json()
        assert new["lastSeenAt"] > seen_at
        assert new == {**again, "token": "phone-of-ann-0002", "lastSeenAt": new["lastSeenAt"]}
        assert (await web.get("/devices?userId=ann")).json()["items"] == [new]
        assert (await web.get("/devices?token=phone-of-ann-0001")).json()["items"] == []
        assert (await web.ask("DELETE", f"/devices/{new['id']}")).json() == new
        is_problem(await web.get(f"/devices/{new['id']}"), 404, "DEVICE_NOT_FOUND")
        is_problem(await web.post("/devices/refresh", {"oldToken": "gone", "token": "x"}), 404, "DEVICE_NOT_FOUND")


INVALID_DEVICES = (
    ({"platform": "nokia"}, "INVALID_DEVICE"),
    ({"timezone": "Mars/Olympus"}, "INVALID_TIMEZONE"),
    ({"pushOnOff": "perhaps"}, "INVALID_DEVICE"),
    ({"attributes": {"a": [1]}}, "INVALID_DEVICE"),
    ({"token": "with space"}, "INVALID_PUSH_MESSAGE"),
    ({"userid": "ann"}, "UNKNOWN_FIELD"),
)


async def test_an_invalid_device_is_refused(make: Callable[..., Any]) -> None:
    async with make() as web:
        for more, code in INVALID_DEVICES:
            is_problem(await web.post("/devices", {**PHONE, **more}), 422, code)
        assert (await web.get("/devices")).json()["items"] == []


async def test_device_lines_are_imported_and_invalid_ones_reported(make: Callable[..., Any]) -> None:
    lines = (
        b'{"token": "phone-0001", "age": 20}\n{"token": "phone-0002", "age": -1}\nno json\n{"token": "phone-0001"}\n'
    )
    csv = b'token,userId,age,marketingOnOff,tier\nphone-0003,"Ann, B.",20,Y,gold\nphone-0001,,,N,\n'
    async with make() as web:
        created = await web.ask("POST", "/devices/bulk", lines, content_type="application/x-ndjson")
        assert created.status_code == 201, created.text
        progress = created.json()["progress"]
        assert (created.json()["state"], progress["done"], progress["failed"]) == ("completed", 1, 2)
        assert [error["line"] for error in created.json()["errors"]] == [2, 3]
        created = await web.ask("POST", "/devices/bulk", csv, content_type="text/csv")
        assert (created.json()["progress"]["done"], created.json()["progress"]["skipped"]) == (1, 1), created.text
        first, third = (await web.get("/devices")).json()["items"]
        assert (first["age"], first["marketingOnOff"]) == (20, False)
        assert (third["userId"], third["attributes"], third["age"]) == ("Ann, B.", {"tier": "gold"}, 20)


CSV_TYPE = {"content_type": "text/csv"}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("token,pushonof", "Did you mean pushOnOff?"),
        ("token,markting_on", "Did you mean marketingOnOff?"),
        ("token,usrId", "Did you mean userId?"),
        ("token,push_on,pushOnOff", "occurs twice"),
        ("tier,age", "no column `token`"),
        ("token,score:float", "Use one of text, number, boolean"),
        ("", "no header line"),
    ],
)
async def test_a_header_that_may_lose_a_consent_is_refused(
    make: Callable[..., Any], header: str, problem: str
) -> None:  # fmt: skip
    async with make() as web:
        created = (await web.ask("POST", "/devices/bulk", f"{header}\nphone-0001,N\n".encode(), **CSV_TYPE)).json()
        assert (created["state"], created["progress"]["done"]) == ("failed", 0) or header == ""
        assert problem in created["errors"][0]["detail"] or header == ""
        assert (await web.get("/devices")).json()["items"] == []


async def test_columns_are_found_under_their_other_names_and_have_types(make: Callable[..., Any]) -> None:
    lines = (
        b"Token,push_on,MARKETING-ON,User ID,score:number,vip:boolean,zip,attributes.usrid\r\n"
        b'phone-0001,N,true,ann,42,yes,01234,"a\r\nb, ""c"""\r\n'
        b"phone-0002,,,,many,,,\r\nphone-0003,maybe,,,,,,\r\nphone-0004,1,,,1.5,,,,,\r\n"
    )
    async with make() as web:
        created = (
            await web.ask("POST", "/devices/bulk", gzip.compress(lines), **CSV_TYPE, content_encoding="gzip")
        ).json()
        assert [(error["line"], error["detail"].split(".")[0]) for error in created["errors"]] == [
            (4, "score is 'many', not a number"), (5, "pushOnOff is 'maybe', not a boolean"),
            (6, "The line has 10 cells, the header 8"),
        ]  # fmt: skip
        (found,) = (await web.get("/devices")).json()["items"]
        assert (found["pushOnOff"], found["marketingOnOff"], found["userId"]) == (False, True, "ann")
        assert found["attributes"] == {"score": 42, "vip": True, "zip": "01234", "usrid": 'a\nb, "c"'}


async def test_a_compressed_import_reads_all_members_and_fails_if_it_is_cut_off(make: Callable[..., Any]) -> None:
    members = [gzip.compress(line) for line in (b"token\nphone-0001\n", b"phone-0002\n")]
    cut_off, trailing = b"".join(members)[:-9], members[0] + b"not compressed"
    async with make() as web:
        for body, state, problem in (
            (b"".join(members), "completed", None), (members[0] + bytes(512), "completed", None),
            (cut_off, "failed", "not valid gzip: it ends too early"), (trailing, "failed", "not valid gzip"),
        ):  # fmt: skip
            created = (await web.ask("POST", "/devices/bulk", body, **CSV_TYPE, content_encoding="gzip")).json()
            assert (created["state"], problem is None) == (state, created["errors"] == [])
            assert problem is None or problem in created["errors"][0]["detail"]
        assert len((await web.get("/devices")).json()["items"]) == 2


async def test_a_missing_quote_costs_one_line(make: Callable[..., Any]) -> None:
    lines = b'token,name\nphone-0000,"open\n' + b"".join(b"phone-%04d,x\n" % n for n in range(1, 300))
    async with make() as web:
        created = (await web.ask("POST", "/devices/bulk", lines, **CSV_TYPE)).json()
        assert (created["progress"]["done"], created["progress"]["failed"]) == (299, 1)
        assert created["errors"][0]["line"] == 2


async def test_attributes_are_added_and_removed(make: Callable[..., Any]) -> None:
    async with make() as web:
        for attributes in ({"tier": "gold", "plan": "pro", "n": 1}, {"plan": "free"}, {"n": None}):
            await web.post("/devices", {"token": "phone-0001", "attributes": attributes})
        (found,) = (await web.get("/devices")).json()["items"]
        assert found["attributes"] == {"tier": "gold", "plan": "free"}


async def test_a_filter_of_the_wrong_type_is_refused(make: Callable[..., Any]) -> None:
    async with make() as web:
        await web.post("/devices", {"token": "phone-0001", "attributes": {"score": "42", "tier": "gold"}})
        for path, body in (
            ("/audiences/count", {"filters": {"attributes": {"score": 42}}}),
            ("/campaigns", {"title": "Hi", "filters": {"attributes": {"score": 42}}}),
        ):
            refused = is_problem(await web.post(path, body), 422, "INVALID_FILTER")
            assert 'score is a text, such as "42"' in refused["detail"]
        assert (await web.post("/audiences/count", {"filters": {"attributes": {"score": "42"}}})).json()["count"] == 1


async def test_invalid_csv_lines_are_reported(make: Callable[..., Any]) -> None:
    async with make() as web:
        lines = (
            b"\xef\xbb\xbftoken,tier\r\nphone-0001,gold\r\nphone-0002,go\rld\r\nphone-0003," + b"x" * 200_000 + b"\r\n"
            b"phone-0004," + "민".encode("cp949") + b"\r\n"
        )
        created = (await web.ask("POST", "/devices/bulk", lines, content_type="text/csv")).json()
        assert (created["state"], created["progress"]["done"], created["progress"]["failed"]) == ("completed", 1, 3)
        assert [(error["line"], error["code"]) for error in created["errors"]] == [
            (3, "INVALID_DEVICE"), (4, "INVALID_DEVICE"), (5, "INVALID_DEVICE"),
        ]  # fmt: skip
        assert created["errors"][2]["detail"].startswith("The line is not in UTF-8. Save the file as UTF-8")
        # Bare carriage returns do not end a line.
        created = (await web.ask("POST", "/devices/bulk", b"token\rphone-0004\r", content_type="text/csv")).json()
        assert (created["state"], created["progress"]["done"]) == ("failed", 0)
        assert "not valid CSV" in created["errors"][0]["detail"]
        created = (await web.ask("POST", "/devices/bulk", b"tier\ngold\n", content_type="text/csv")).json()
        problem = (
            "There is no column `token`. The first line has the names of the columns, with commas between them."
        )  # fmt: skip
        assert [error["detail"] for error in created["errors"]] == [problem]


async def test_a_secret_used_by_an_audience_cannot_be_deleted(make: Callable[..., Any], tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.db"
    with closing(sqlite3.connect(theirs)) as connection:
        connection.execute("CREATE TABLE people (id integer PRIMARY KEY, token text)")
    async with make() as web:
        await web.post("/secrets", {"name": "crm", "value": f"sqlite:///{theirs}"})
        source = {"url": {"secret": "crm"}, "query": "SELECT id, token FROM people", "key": "id"}
        assert (await web.ask("PUT", "/audiences/buyers", source)).status_code == 200
        refused = is_problem(await web.ask("DELETE", "/secrets/crm"), 409, "SECRET_IN_USE")
        assert "1 audience: buyers" in refused["detail"]
        await web.ask("DELETE", "/audiences/buyers")
        assert (await web.ask("DELETE", "/secrets/crm")).status_code == 200


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
async def test_an_audience_whose_database_does_not_answer_delays_no_other_change(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_audience, "CHECK_TIMEOUT_SECONDS", 60.0)
    connections: list[asyncio.StreamWriter] = []
    database = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    url = f"mysql://me@127.0.0.1:{database.sockets[0].getsockname()[1]}/crm"
    async with make() as web:
        source = {"url": url, "query": "SELECT id, token FROM people", "key": "id"}
        put = asyncio.create_task(web.ask("PUT", "/audiences/buyers", source))
        try:
            async with asyncio.timeout(10):
                while not connections:
                    await asyncio.sleep(0.02)
                await web.app.schedule_at("mail.send", timezone="UTC")
        finally:
            database.close()
            for connection in connections:
                connection.close()
        is_problem(await put, 422, "AUDIENCE_UNREADABLE")


async def test_audience_filters_are_counted(make: Callable[..., Any]) -> None:
    async with make() as web:
        await register_devices(
            web,
            {"token": "phone-of-bob-0001", "gender": "M", "age": 40, "attributes": {"visits": 30}},
            {"token": "phone-of-cem-0001", "gender": "F", "pushOnOff": "N", "attributes": {"tier": "goldish"}},
        )  # fmt: skip
        for filters, count in (
            ({}, 3), ({"gender": "F"}, 2), ({"ageMin": 31, "ageMax": 40}, 2), ({"ageMin": 32}, 1),
            ({"platform": "iOS"}, 1), ({"pushOnOff": "Y"}, 2), ({"marketingOnOff": True}, 1), ({"topic": "news"}, 1),
            ({"attributes": {"tier": "gold"}}, 1), ({"attributes": {"visits": 3}}, 1), ({"topic": "new"}, 0),
            ({"timezone": "Asia/Seoul"}, 1), ({"gender": "", "ageMin": None}, 3),
        ):  # fmt: skip
            answer = await web.post("/audiences/count", {"filters": filters})
            assert answer.json()["count"] == count, (filters, answer.text)
        is_problem(await web.post("/audiences/count", {"filters": {"agemin": 3}}), 422, "INVALID_FILTER")


async def test_a_pending_campaign_is_edited_and_a_stopped_one_is_not(make: Callable[..., Any]) -> None:
    async with make() as web:
        await register_devices(web)
        created = await web.post("/campaigns", READING)
        assert created.status_code == 201, created.text
        body = created.json()
        assert (body["state"], body["sendAt"]) == ("pending", "2030-03-01T07:15:00Z")
        assert (body["timezone"], body["chunkSize"], body["chunkDelayMs"]) == ("Asia/Seoul", 500, 2000)
        assert body["filters"] == {"gender": "F", "marketingOnOff": True}
        path = f"/campaigns/{body['id']}"
        request = (await web.get(f"{path}/preview")).json()["request"]["message"]
        assert request["data"] == {"division": "bible", "version": "0", "bibleCode": "3"}
        assert request["notification"] == {"title": "Today's reading", "body": "Psalm 22"}
        is_problem(await web.ask("PATCH", path, {"title": "Later"}), 428, "REVISION_MISSING")
        changed = await web.ask("PATCH", path, {"sendAt": "2030-03-02T16:15:00"}, if_match=created.headers["etag"])
        assert changed.json()["sendAt"] == "2030-03-02T07:15:00Z"
        is_problem(
            await web.ask("PATCH", path, {"title": "x"}, if_match=created.headers["etag"]), 412, "REVISION_STALE"
        )
        old, job = body["jobId"], changed.json()["jobId"]
        assert (await web.get(f"/jobs/{old}")).json()["status"] == "cancelled"
        assert (await web.get(f"/jobs/{job}")).json()["runAt"] == "2030-03-02T07:15:00Z"
        zones = (await web.get(f"{path}/timetable")).json()
        assert (zones["recipients"], zones["zones"][0]["first"]) == (1, "2030-03-02T07:15:00Z")
        assert (await web.post(f"{path}/stop", {"reason": "no"})).json()["state"] == "stopped"
        is_problem(await web.ask("PATCH", path, {"title": "x"}, if_match="*"), 409, "CAMPAIGN_STATE")
        assert [each["token"] for each in (await web.get(f"{path}/remaining")).json()["items"]] == [PHONE["token"]]
        assert (await web.get(f"{path}/chunks?cursor={10**19}")).json()["items"] == []
        is_problem(await web.post("/campaigns/no-such/stop"), 404, "CAMPAIGN_NOT_FOUND")


async def test_a_pinned_campaign_excludes_devices_registered_later(make: Callable[..., Any]) -> None:
    async with make() as web:
        await register_devices(web)
        created = (await web.post("/campaigns", {"title": "Hello", "sendAt": "2035-01-01T00:00:00Z",
                                              "audienceFormat": "pinned"})).json()  # fmt: skip
        await register_devices(web, {"token": "phone-of-late-0001"})
        found = await web.app.campaigns.get(created["id"])
        assert found.pinned_at is not None
        assert await web.app.store.run(progress.count_recipients, found) == 1


INVALID_CAMPAIGNS = (
    ({"sendAt": "2020-01-01T00:00:00"}, 400, "SCHEDULE_IN_THE_PAST"),
    ({"sendAt": "2030-01-01T00:00:00", "timezone": "Mars/Olympus"}, 422, "INVALID_TIMEZONE"),
    ({"marketing": True, "filters": {}}, 422, "CONSENT_FILTER_MISSING"),
    ({"filters": {"topic": "unused-topic"}}, 422, "UNKNOWN_TOPIC"),
    ({"data": {"from": "me"}}, 422, "INVALID_PUSH_MESSAGE"),
    ({"data": {"google.x": "me"}}, 422, "INVALID_PUSH_MESSAGE"),
    ({"content": "x" * 4090}, 422, "PUSH_MESSAGE_TOO_LARGE"),
    ({"title": None, "content": None, "data": None}, 422, "INVALID_PUSH_MESSAGE"),
    ({"notificationId": "n-{{user}}"}, 422, "INVALID_TEMPLATE"),
    ({"quietHours": {"start": "9"}}, 422, "INVALID_CAMPAIGN"),
    ({"quietHours": {"start": "21:00:10", "end": "21:00:40"}}, 422, "INVALID_CAMPAIGN"),
    ({"expiresAt": "0001-01-01T00:00:00+14:00"}, 422, "INVALID_CAMPAIGN"),
    ({"canary": {"size": 0, "maxErrorRate": 2}}, 422, "INVALID_CAMPAIGN"),
    ({"chunkSize": 501}, 422, "INVALID_FIELDS"),
    ({"localTime": "2030-03-01T09:00"}, 422, "INVALID_CAMPAIGN"),
    ({"filter": {}}, 422, "UNKNOWN_FIELD"),
    ({"filters": {"audience": "unknown"}}, 422, "UNKNOWN_AUDIENCE"),
)


async def test_an_invalid_campaign_is_refused_at_creation(make: Callable[..., Any]) -> None:
    async with make() as web:
        await register_devices(web)
        for more, status, code in INVALID_CAMPAIGNS:
            is_problem(await web.post("/campaigns", {**READING, **more}), status, code)
        assert (await web.get("/campaigns")).json()["items"] == []
        assert (await web.get("/jobs")).json()["items"] == []


FIXES = (
    ({"marketing": True, "filters": {}}, "CONSENT_FILTER_MISSING", 'Add "marketingOnOff": true to filters'),
    ({"filters": {"topic": "unused-topic"}}, "UNKNOWN_TOPIC", "Register devices with the topics"),
    ({"data": {"gcm.x": "me"}}, "INVALID_PUSH_MESSAGE", "FCM reserves from, notification, message_type"),
    ({"content": "x" * 4090}, "PUSH_MESSAGE_TOO_LARGE", "Send an id, and let the app fetch the rest"),
    ({"sendAt": "2020-01-01T00:00:00"}, "SCHEDULE_IN_THE_PAST", "Specify a later time"),
    ({"filters": {"audience": "unknown"}}, "UNKNOWN_AUDIENCE", "PUT /audiences/"),
    ({"filters": {"agemin": 3}}, "INVALID_FILTER", "Did you mean ageMin?"),
    ({"quietHours": {"start": "21:00", "end": "21:00"}}, "INVALID_QUIET_HOURS", "21:00 to 08:00"),
)


async def test_a_refusal_has_the_same_fix_on_every_route(make: Callable[..., Any]) -> None:
    async with make() as web:
        await register_devices(web)
        created = await web.post("/campaigns", READING)
        path = f"/campaigns/{created.json()['id']}"
        for more, code, fix in FIXES:
            again = {**READING, "cronExpression": "15 16 * * *", "name": "daily", "sendAt": None, **more}
            answers = [
                await web.post("/campaigns", {**READING, **more}),
                await web.ask("PATCH", path, more, if_match="*"),
            ]
            answers += [] if "sendAt" in more else [await web.post("/campaigns", again)]
            for answer in answers:
                assert fix in is_problem(answer, answer.status_code, code)["fix"]
                assert answer.status_code in (400, 422)
        assert (await web.get(path)).json() == created.json()
        assert (await web.get("/schedules")).json()["items"] == []


async def open_first_chunk(web: Web, id_: str, accepted: int) -> None:
    """Open the first chunk of a campaign and accept its first `accepted` messages."""
    campaign = await web.app.campaigns.get(id_)
    now = web.app.clock.now()
    opened = await web.app.store.run(chunks.open_chunk, id_, 1, campaign.job_id, 1, now)
    results = [DeliveryResult(each, "accepted", None, "m-1") for each in opened.recipients[:accepted]]
    await web.app.store.run(chunk_results.close_chunk, id_, 1, 1, results, len(opened.recipients) - accepted, now)


async def test_a_running_campaign_has_a_forecast(make: Callable[..., Any]) -> None:
    async with make() as web:
        await register_devices(web, *({"token": f"phone-000{n}"} for n in range(3)))
        id_ = (await web.post("/campaigns", {"title": "Hello", "chunkSize": 1})).json()["id"]
        assert (await web.get(f"/campaigns/{id_}")).json()["forecast"] is None
        await open_first_chunk(web, id_, 1)
        forecast = (await web.get(f"/campaigns/{id_}")).json()["forecast"]
        assert forecast == {"rate": None, "endsAt": None, "waitingUntil": None, "waitingForZone": None}


async def test_all_recipients_are_exported(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_export, "EXPORT_PAGE_SIZE", 2)
    async with make() as web:
        await register_devices(web, *({"token": f"phone-000{n}", "userId": f"=user{n}"} for n in range(4)))
        id_ = (await web.post("/campaigns", {"title": "Hello"})).json()["id"]
        await open_first_chunk(web, id_, 3)
        gone = (await web.get("/devices?userId==user3")).json()["items"][0]["id"]
        await web.ask("DELETE", f"/devices/{gone}")
        path = f"/campaigns/{id_}/deliveries/export"
        listed = (await web.get(f"/campaigns/{id_}/deliveries")).json()["items"]
        answer = await web.get(f"{path}?format=ndjson")
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert f'filename="timebell-campaign-{id_}.ndjson"' in answer.headers["content-disposition"]
        assert [json.loads(line) for line in answer.text.splitlines()] == listed
        assert {row["deviceId"]: row["userId"] for row in listed}[gone] is None
        assert {row["userId"] for row in listed} == {"ann", "=user0", "=user1", "=user2", None}
        assert all(row["startedAt"] is not None for row in listed)
        table = list(csv.DictReader((await web.get(path)).text.splitlines()))
        assert [row["deviceId"] for row in table] == [row["deviceId"] for row in listed]
        assert {row["userId"] for row in table} == {"ann", "'=user0", "'=user1", "'=user2", ""}
        accepted = list(csv.DictReader((await web.get(f"{path}?state=accepted")).text.splitlines()))
        assert [(row["messageId"], row["attempts"]) for row in accepted] == [("m-1", "1")] * 3
        is_problem(await web.get(f"{path}?format=xml"), 422, "INVALID_FIELDS")
        is_problem(await web.get(path.replace(id_, "no-such")), 404, "CAMPAIGN_NOT_FOUND")


async def test_a_recurring_campaign_creates_a_schedule(make: Callable[..., Any]) -> None:
    async with make() as web:
        await register_devices(web)
        body = {**READING, "cronExpression": "15 16 * * *", "name": "daily", "sendAt": None}
        created = await web.post("/campaigns", body)
        assert created.status_code == 201, created.text
        schedule = (await web.get(f"/schedules/{created.json()['scheduleId']}")).json()
        assert (schedule["name"], schedule["cronExpression"], schedule["timezone"]) == (
            "daily", "15 16 * * *", "Asia/Seoul",
        )  # fmt: skip
        assert schedule["payload"]["campaign"]["filters"] == {"gender": "F", "marketingOnOff": True}


async def test_a_recurring_campaign_at_local_times_runs_in_the_earliest_zone(make: Callable[..., Any]) -> None:
    async with make() as web:
        body = {"title": "Hello", "cronExpression": "0 9 * * *", "name": "daily", "inRecipientZones": True}
        created = await web.post("/campaigns", {**body, "timezone": "Asia/Seoul"})
        schedule = (await web.get(f"/schedules/{created.json()['scheduleId']}")).json()
        assert (schedule["timezone"], schedule["payload"]["recipientsTimezone"]) == ("Etc/GMT-14", "Asia/Seoul")
        assert schedule["nextFireAt"].endswith("T19:00:00Z")
        refused = await web.post("/campaigns", {"title": "Hello", "inRecipientZones": True})
        is_problem(refused, 422, "INVALID_CAMPAIGN")


async def test_tenants_do_not_see_each_other(make: Callable[..., Any]) -> None:
    async with make(open_here=False) as web:
        theirs, mine = await web.key(tenant="them"), await web.key(tenant="me")
        device = (await web.post("/devices", PHONE, key=theirs)).json()
        campaign = (await web.post("/campaigns", READING, key=theirs)).json()
        is_problem(await web.get(f"/devices/{device['id']}", key=mine), 404, "DEVICE_NOT_FOUND")
        is_problem(await web.post(f"/campaigns/{campaign['id']}/start", key=mine), 404, "CAMPAIGN_NOT_FOUND")
        assert (await web.post("/audiences/count", {}, key=mine)).json()["count"] == 0


async def test_an_empty_time_zone_is_refused_instead_of_replaced_by_the_default(make: Callable[..., Any]) -> None:
    message = {"title": "t", "body": "b", "localTime": "2090-01-01T09:00:00"}
    async with make(timezone="UTC") as web:
        is_problem(await web.post("/campaigns", {**message, "timezone": ""}), 422, "INVALID_TIMEZONE")
        created = await web.post("/campaigns", {**message, "timezone": "Asia/Seoul"})
        assert created.status_code == 201, created.text
        changed = await web.ask("PATCH", f"/campaigns/{created.json()['id']}", {"timezone": ""}, if_match="*")
        is_problem(changed, 422, "INVALID_TIMEZONE")
