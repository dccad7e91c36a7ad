"""Conformance of the built-in targets, and proof that the suite detects faulty targets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.targets.sink import NOW, SECRET, local, resolver, sink
from timebell import Arrived, Timebell
from timebell.errors import InvalidInput
from timebell.targets import http_connections
from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery, Outcome
from timebell.targets.command import CommandTarget
from timebell.targets.handler import Handler, Handlers
from timebell.targets.http import HttpTarget
from timebell.testing.targets import Received, Scene, TargetConformance


class TestHttp(TargetConformance):
    @pytest.fixture(autouse=True)
    def _soon_unconnected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_connections, "CONNECT_SECONDS", 0.8)

    @asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        async with sink() as server:
            place = f"http://hooks.example:{server.port}"
            options = {"url": f"{place}/status/200", "headers": {"Authorization": "Bearer s3cr3t"}}

            def received() -> list[Received]:
                events = [json.loads(request.body) for request in server.requests]
                return [
                    Received(event["data"]["payload"], request.headers["webhook-id"])
                    for event, request in zip(events, server.requests, strict=True)
                ]

            async with sink() as gone:
                unreachable_url = f"http://hooks.example:{gone.port}/"
            yield Scene(
                local(60.0 / 2), options, received,
                invalid_options=[
                    {}, {"url": "ftp://x"}, {"url": place, "body": "xml"}, {"url": place, "template": "{{payload"}
                ],
                unreachable=(local(), {"url": unreachable_url, "headers": {"Authorization": "Bearer s3cr3t"}}),
                slow_options={"url": f"{place}/hang"}, secrets=["s3cr3t", SECRET],
            )  # fmt: skip


class TestHttpThatLeadsInside(TestHttp):
    """HTTP with a name that resolves to an internal address as the unreachable receiver."""

    @asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        async with super().scene() as scene:
            shut = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(resolve=resolver("10.0.0.1")))
            scene.unreachable = (shut, {"url": "https://hooks.example/"})
            yield scene


class TestCommand(TargetConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.log = tmp_path / "log"

    @asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        # One write per command, so that lines are not interleaved.
        save = ["/bin/sh", "-c", 'line=$(cat); printf "%s\\n" "$line" >> "$0"', str(self.log)]

        def received() -> list[Received]:
            lines = self.log.read_text().splitlines() if self.log.exists() else []
            return [Received(json.loads(line)["payload"]) for line in lines]

        yield Scene(
            CommandTarget(enabled=True), {"argv": save, "env": {"TOKEN": "s3cr3t"}}, received,
            invalid_options=[{}, {"argv": "ls"}, {"argv": []}, {"argv": ["ls"], "stdin": "x", "body": "plain"}],
            unreachable=(CommandTarget(enabled=True), {"argv": ["/no/such/program"], "env": {"TOKEN": "s3cr3t"}}),
            slow_options={"argv": ["/bin/sleep", "60"]}, secrets=["s3cr3t"],
        )  # fmt: skip


class TestHandlers(TargetConformance):
    @asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        events: list[Received] = []
        handlers = Handlers()

        async def take(event: Arrived) -> None:
            events.append(Received(event.payload))

        handlers.add(Handler("conformance.test", take))
        yield Scene(handlers, {}, lambda: list(events))


# --- Custom kinds ---------------------------------------------------------------------------------


class Lines:
    """Append a line to a file for each delivery."""

    kind = "lines"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = 0

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.keys() - {"prefix"}:
            raise InvalidInput("A line has a prefix and nothing else.", code="INVALID_TARGET_OPTIONS")
        return {"prefix": options.get("prefix", "")}

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        with closing(self.path.open("a")) as file:
            file.write(f"{options['prefix']}{delivery.topic}\n")
        return Outcome.ok({"lines": 1})

    async def close(self) -> None:
        self.closed += 1


def test_a_custom_target_kind_works_like_the_built_in_ones(tmp_path: Path) -> None:
    target = Lines(tmp_path / "lines")

    async def main() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/own.db", timezone="UTC", targets=[target])
        async with app.running() as service:
            made = await app.schedule_at("a.b", target={"kind": "lines", "prefix": "> "})
            with pytest.raises(InvalidInput, match="a prefix and nothing else"):
                await app.schedule_at("a.b", target={"kind": "lines", "suffix": "<"})
            with pytest.raises(InvalidInput, match=r"http, command,.* lines"):
                await app.schedule_at("a.b", target={"kind": "line"})
            await service.wait_until_idle()
        job = await app.get(made.id)
        assert (job.status, job.result, job.target) == (
            "completed", {"lines": 1}, {"kind": "lines", "options": {"prefix": "> "}},
        )  # fmt: skip
        (sent,) = job.attempts
        assert (sent["kind"], sent["messageId"]) == ("lines", job.id)
        await app.close()

    asyncio.run(main())
    assert target.path.read_text() == "> a.b\n"
    assert target.closed == 1


def test_jobs_of_a_target_kind_wait_for_a_node_that_supports_it(tmp_path: Path) -> None:
    target = Lines(tmp_path / "lines")
    url = f"sqlite:///{tmp_path}/own.db"

    async def main() -> None:
        async with Timebell(url, timezone="UTC").running() as service:
            maker = Timebell(url, timezone="UTC", targets=[target])
            made = await maker.schedule_at("a.b", target={"kind": "lines"})
            await service.wait_until_idle()
            assert (await maker.get(made.id)).status == "pending"
        async with maker.running() as service:
            async with asyncio.timeout(40):
                while (await maker.get(made.id)).status != "completed":
                    await asyncio.sleep(0.02)
        await maker.close()

    asyncio.run(main())


class Shadow(Lines):
    kind = "http"


class Nameless(Lines):
    kind = "Not a name"


@pytest.mark.parametrize("bad", [Shadow(Path()), Nameless(Path()), Lines, object(), None, "lines"])
def test_an_object_that_is_not_a_target_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        Timebell("sqlite:///x.db", targets=[bad])
    assert caught.value.code == "INVALID_TARGET"
    with pytest.raises(InvalidInput):
        Timebell("sqlite:///x.db", targets=[Lines(Path()), Lines(Path())])


# --- The suite detects faults ------------------------------------------------------------------------


class Broken(TargetConformance):
    """A target with one fault, and the scene around it."""

    def __init__(self, fault: str) -> None:
        self.error = fault

    @asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        arrived: list[Received] = []
        fault = self.error

        class Target:
            kind = "broken"

            def check(self, options: dict[str, Any]) -> dict[str, Any]:
                if fault != "takes anything" and options.keys() - {"slow", "times"}:
                    raise InvalidInput("s3cr3t" if fault == "a secret in a refusal" else "No.", code="NO")
                if fault == "changes what it is given":
                    options["slow"] = False
                times = options.get("times", 0) + (fault == "no normal form")
                return {"slow": options.get("slow", False), "times": times}

            async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
                if options["slow"]:
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        if fault != "swallows its cancellation":
                            raise
                        return Outcome.ok()
                if fault == "claims what it did not do":
                    return Outcome.ok()
                text = json.dumps(delivery.payload, default=str if fault == "writes anything" else None)
                if fault == "drops large ones" and len(text) > 10_000:
                    return Outcome.ok()
                key = f"{delivery.job_id}.{delivery.attempt}" if fault == "an id an attempt" else delivery.job_id
                suffix = (
                    f".r{delivery.manual_retries}"
                    if delivery.manual_retries and fault != "manual retries look the same"
                    else ""
                )
                arrived.append(Received(json.loads(text), key + suffix))
                if fault == "twice":
                    arrived.append(arrived[-1])
                return Outcome.ok({"token": "s3cr3t"} if fault == "a secret in a result" else None)

            async def close(self) -> None:
                if fault == "closes once":
                    if hasattr(self, "over"):
                        raise RuntimeError
                    self.over = True

        class Unreachable(Target):
            async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
                if fault == "raises":
                    raise ConnectionError("s3cr3t")
                return Outcome.failed(
                    "not a code" if fault == "no code" else "GONE", "" if fault == "no words" else "x"
                )

        yield Scene(
            Target(), {}, lambda: list(arrived), invalid_options=[{"x": 1}], unreachable=(Unreachable(), {}),
            slow_options={"slow": True}, secrets=["s3cr3t"],
        )  # fmt: skip


TESTS = sorted(name for name in vars(TargetConformance) if name.startswith("test_"))
FAULTS = [
    "takes anything", "a secret in a refusal", "changes what it is given", "no normal form", "writes anything",
    "swallows its cancellation", "claims what it did not do", "drops large ones", "an id an attempt", "no words",
    "manual retries look the same", "twice", "a secret in a result", "closes once", "raises", "no code",
]  # fmt: skip


def found(fault: str) -> list[str]:
    """Return the names of the tests that fail."""
    failed = []
    for name in TESTS:
        try:
            getattr(Broken(fault), name)()
        except (Exception, pytest.fail.Exception):
            failed.append(name)
    return failed


def test_a_correct_target_passes() -> None:
    assert found("none") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_detected(fault: str) -> None:
    assert found(fault)
