"""Control of jobs from Python: fail for good, choose what is retried, wait for the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from timebell import Arrived, Fail, Retry, Timebell
from timebell.errors import InvalidInput, JobFailed, WaitTimeout
from timebell.testing.kit import Kit


@pytest.mark.parametrize("kind", ["plain", "async", "waiting"])
@pytest.mark.parametrize(
    ("error", "attempts"),
    [(Fail("card was stolen"), 1), (ValueError("bad"), 1), (KeyError("other"), 1), (TimeoutError("slow"), 3)],
)
def test_the_handler_decides_what_is_retried(timebell: Kit, kind: str, error: Exception, attempts: int) -> None:
    def plain(event: Arrived) -> None:
        raise error

    async def fail(event: Arrived) -> None:
        if kind == "waiting":
            await asyncio.sleep(0.1)
        raise error

    retry = Retry(attempts=3, delay=1, retry_on=(OSError, ValueError), fail_on=(ValueError,))
    timebell.app.on("work", retry=retry)(plain if kind == "plain" else fail)
    job = timebell.run(timebell.app.schedule_in("work", 1))
    timebell.advance(minutes=1)
    failed = timebell.run(timebell.app.get(job.id))
    assert (failed.state, len(failed.attempts), failed.attempts[-1]["code"]) == (
        "failed", attempts, type(error).__name__,
    )  # fmt: skip
    assert str(error) in failed.attempts[-1]["error"]


def test_exception_lists_belong_to_handlers(timebell: Kit) -> None:
    with pytest.raises(InvalidInput, match="cannot be stored"):
        timebell.run(timebell.app.schedule_in("work", 1, retry=Retry(fail_on=(ValueError,))))
    with pytest.raises(InvalidInput, match="retry retry_on is"):
        Retry(retry_on=("TimeoutError",))  # type: ignore[arg-type]


def test_wait_returns_the_completed_job_or_raises(timebell: Kit) -> None:
    @timebell.app.on("work")
    async def work(event: Arrived) -> str:
        if event.payload == "fail":
            raise Fail("no money")
        return "done"

    app = timebell.app
    timebell.start()
    done, failed = (timebell.run(app.schedule_in("work", 5, payload=payload)) for payload in ("", "fail"))
    with pytest.raises(WaitTimeout, match="is pending after 2 seconds"):
        timebell.run(app.wait(done.id, timeout="2s"))
    assert timebell.run(app.wait(done.id, timeout=10)).result == "done"
    with pytest.raises(JobFailed, match=r"no money.*app\.get"):
        timebell.run(app.wait(failed.id))


def test_tables_are_created_by_the_library_alone(tmp_path: Path) -> None:
    app = Timebell(f"sqlite:///{tmp_path}/bell.db")
    assert app.sync.upgrade() == app.sync.upgrade()
    app.sync.close()
