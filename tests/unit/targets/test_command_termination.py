"""The command target ends all processes that it started."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from timebell.targets.base import Delivery, Outcome
from timebell.targets.command import CommandTarget

Children = Callable[[], set[str]]
Run = Callable[[Any], Any]
Do = Callable[..., Outcome]


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


class Witness:
    """A named pipe that a process holds open as long as it lives."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "witness")
        os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._own_end = os.open(self.path, os.O_WRONLY)  # keeps the pipe open until the first writer opens it

    def receive(self) -> str:
        """Return the next text, or "" once every process that held the pipe has ended. Waits at most a minute."""
        assert select.select([self._pipe], [], [], 60)[0]
        return os.read(self._pipe, 100).decode().strip()

    def release(self) -> None:
        os.close(self._own_end)

    def close(self) -> None:
        os.close(self._pipe)


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    pipe = Witness(tmp_path)
    yield pipe
    pipe.close()


# a child that ignores SIGTERM, and a grandchild that holds the witness and every inherited pipe
STUBBORN = """
trap '' TERM
(trap '' TERM; exec 9>"$WITNESS"; echo up >&9; while :; do sleep 1000; done) &
wait; while :; do sleep 1000; done
"""
GENTLE = f"""
{sys.executable} -c '
import os, signal
witness = os.open(os.environ["WITNESS"], os.O_WRONLY)
signal.signal(signal.SIGTERM, lambda *_: (os.write(witness, b"ended"), os._exit(0)))
os.write(witness, b"up")
while True: signal.pause()
' &
wait
"""


async def cancelled(target: CommandTarget, delivery: Delivery, witness: Witness, script: str, times: int) -> None:
    """Cancel a command after it has started and read its stdin."""
    options = target.check({"argv": ["sh", "-c", "read -r _" + script], "env": {"WITNESS": witness.path}})
    attempt = asyncio.create_task(target.deliver(delivery, options))
    assert await asyncio.to_thread(witness.receive) == "up"
    for _ in range(times):
        attempt.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await attempt
    witness.release()


def test_cancellation_kills_grandchildren_that_ignore_sigterm(
    run: Run, delivery: Delivery, witness: Witness, children: Children
) -> None:
    servers = children()
    run(cancelled(CommandTarget(enabled=True, grace=0.1), delivery, witness, STUBBORN, times=1))
    assert witness.receive() == ""
    assert children() <= servers, "the child was not reaped"


def test_cancellation_lets_processes_clean_up_on_sigterm(run: Run, delivery: Delivery, witness: Witness) -> None:
    run(cancelled(CommandTarget(enabled=True, grace=10), delivery, witness, GENTLE, times=1))
    assert witness.receive() == "ended"
    assert witness.receive() == ""


def test_second_cancellation_kills_without_a_grace_period(run: Run, delivery: Delivery, witness: Witness) -> None:
    run(cancelled(CommandTarget(enabled=True, grace=20), delivery, witness, STUBBORN, times=2))
    assert witness.receive() == ""


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("loop_iterations", range(2, 10))
def test_cancellation_at_any_point_of_the_start(
    run: Run, delivery: Delivery, witness: Witness, children: Children, loop_iterations: int, times: int
) -> None:
    async def main() -> None:
        target = CommandTarget(enabled=True, grace=0.1)
        options = target.check({"argv": ["sh", "-c", STUBBORN], "env": {"WITNESS": witness.path}})
        servers = children()
        attempt = asyncio.create_task(target.deliver(delivery, options))
        for _ in range(loop_iterations):
            await asyncio.sleep(0)
        assert witness.receive() == "up"  # blocks the loop in this iteration until the grandchild runs
        for _ in range(times):
            attempt.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await attempt
        witness.release()
        assert await asyncio.to_thread(witness.receive) == ""
        while children() - servers:  # until the event loop has waited for every child
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)

    run(main())


def test_processes_left_by_a_finished_command_are_killed(do: Do, witness: Witness) -> None:
    script = """trap '' TERM; exec 9>"$WITNESS"; (while :; do sleep 1000; done) & echo done"""
    target = CommandTarget(enabled=True, grace=0.1)
    outcome = do("sh", "-c", script, target=target, env={"WITNESS": witness.path})
    assert outcome.result["stdout"] == "done\n"
    witness.release()
    assert witness.receive() == ""


def test_daemon_outside_the_process_group_does_not_delay_the_job(do: Do) -> None:
    code = """
import os, signal
ready, started = os.pipe()
if (daemon := os.fork()) == 0:
    os.setsid(); os.write(started, b"x"); signal.pause()
os.read(ready, 1)
print(daemon)
"""
    outcome = do(*python(code), target=CommandTarget(enabled=True, grace=0.1))
    assert outcome.delivered
    os.kill(int(outcome.result["stdout"]), signal.SIGKILL)
