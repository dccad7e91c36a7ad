"""Texts that differ by recipient: placeholders with fallbacks, and languages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from timebell import Timebell
from timebell.errors import InvalidInput, NotFound
from timebell_fcm_emulator import FakeFcm

from .test_campaigns import ended

MESSAGE = {
    "title": "Hi {{attributes.name|there}}",
    "body": "You have {{ attributes.points | no }} points",
    "data": {"who": "{{userId|}}", "n": 1},
    "link": "https://x.test/{{deviceId}}",
    "translations": {"ko": {"title": "안녕 {{attributes.name|여러분}}"}, "pt": {"body": "Olá"}},
    "sound": "default",
}


def test_each_recipient_gets_texts_of_their_own(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await app.devices.register(
            "phone-of-ann", user_id="ann", language="ko-KR", attributes={"name": "Ann {{x}}", "points": 1200}
        )
        await app.devices.register("phone-of-bob", language="pt_BR", attributes={"name": ""})
        await app.devices.register("phone-of-cem", language="fr")
        created = await app.campaigns.create(MESSAGE)
        assert (await ended(app, created)).accepted == 3
        sent = {token: bodies[0]["message"] for token, bodies in fcm.bodies().items()}
        assert sent["phone-of-ann"]["notification"] == {
            "title": "안녕 Ann {{x}}", "body": "You have 1200 points"
        }  # fmt: skip
        assert sent["phone-of-bob"]["notification"] == {"title": "Hi there", "body": "Olá"}
        assert sent["phone-of-cem"]["notification"] == {"title": "Hi there", "body": "You have no points"}
        (ann,) = (await app.devices.list(user_id="ann")).items
        assert sent["phone-of-ann"]["data"] == {"who": "ann", "n": "1", "link": f"https://x.test/{ann.id}"}
        assert sent["phone-of-cem"]["data"]["who"] == ""
        preview = await app.campaigns.preview(created.id, user_id="ann")
        assert preview["message"] == sent["phone-of-ann"]
        example = await app.campaigns.preview(created.id)
        assert example["message"]["notification"]["title"] == "Hi there"
        with pytest.raises(NotFound):
            await app.campaigns.preview(created.id, user_id="nobody")

    run(body)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("title", "Hi {{payload.name|x}}"), ("title", "Hi {{name|x}}"), ("title", "Hi {{attributes.name}}"),
        ("body", "Hi {{userId}}"), ("body", "Hi {{attributes.name|x"), ("data", {"a": "{{x}}"}),
        ("link", "https://x.test/{{x}}"), ("translations", {"ko": {"title": "{{x}}"}}),
    ],
)  # fmt: skip
def test_a_placeholder_without_a_value_for_everyone_is_refused(
    run: Callable[..., None], field: str, text: object
) -> None:
    async def body(app: Timebell, service: Any) -> None:
        with pytest.raises(InvalidInput) as refused:
            await app.campaigns.create({"title": "Hi", field: text})
        assert refused.value.code == "INVALID_TEMPLATE"

    run(body)


def test_each_user_gets_the_texts_of_one_variant_and_reports_opening_them(
    run: Callable[..., None], fcm: FakeFcm
) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await app.devices.register_many(
            {"token": f"phone-{n:04}", "attributes": {"name": f"Ann {n}"}} for n in range(40)
        )
        variants = [{"name": "plain"}, {"name": "personal", "title": "Hi {{attributes.name|there}}", "data": {"v": 2}}]
        created = await app.campaigns.create({"title": "Hello", "trackOpens": True, "variants": variants})
        while (await app.campaigns.get(created.id)).ended_at is None:
            await service.wait_until_idle()
        titles = set()
        for token, (request,) in fcm.bodies().items():
            message = request["message"]
            title, data = message["notification"]["title"], message["data"]
            assert data["campaignId"] == created.id
            assert title == ("Hello" if "v" not in data else f"Hi Ann {int(token[-4:])}")
            titles.add(title)
            if title == "Hello":
                assert await app.campaigns.report_open(created.id, token)
        assert len(titles) > 5
        plain, personal = await app.campaigns.results(created.id)
        assert (plain.opened, personal.opened) == (plain.accepted, 0)
        assert plain.accepted + personal.accepted == 40
        with pytest.raises(InvalidInput):
            await app.campaigns.preview(created.id, variant="other")
        preview = await app.campaigns.preview(created.id, variant="personal")
        assert preview["message"]["notification"]["title"] == "Hi there"

    run(body)
