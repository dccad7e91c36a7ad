"""The command target with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from timebell.errors import InvalidInput, Refused
from timebell.targets.base import Delivery, Outcome, facts
from timebell.targets.command import CommandTarget

Run = Callable[[Any], Any]
Do = Callable[..., Outcome]


@pytest.fixture
def do(run: Run, delivery: Delivery) -> Do:
    """Check the options, run the command, and find no child left behind."""

    def do(*argv: str, target: CommandTarget | None = None, **options: Any) -> Outcome:
        used = target or CommandTarget(enabled=True)
        outcome: Outcome = run(used.deliver(delivery, used.check({"argv": list(argv), **options})))
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        return outcome

    return do


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


def test_status_zero_is_delivered_and_its_output_kept(do: Do) -> None:
    outcome = do("sh", "-c", "echo out; echo err >&2")
    assert outcome == Outcome.ok({"exitCode": 0, "stdout": "out\n", "stderr": "err\n"})


@pytest.mark.parametrize("status", [1, 2, 126, 255])
def test_another_status_is_a_failure_to_retry(do: Do, status: int) -> None:
    outcome = do("sh", "-c", f"echo why >&2; exit {status}")
    assert (outcome.code, outcome.retryable) == ("EXIT_STATUS", True)
    assert outcome.result == {"exitCode": status, "stdout": "", "stderr": "why\n"}
    assert outcome.error == f"The command exited with {status}."


def test_death_by_signal(do: Do) -> None:
    outcome = do("sh", "-c", "kill -9 $$")
    assert (outcome.code, outcome.result["exitCode"]) == ("EXIT_STATUS", -9)
    assert outcome.error == "The command was ended by signal 9."


def test_arguments_meet_no_shell(do: Do) -> None:
    assert do("printf", "%s|", "a b", "$(id)", "*", "; ls").result["stdout"] == "a b|$(id)|*|; ls|"


@pytest.mark.parametrize("argv", [["/no/such/program"], ["no-such-program"], ["/etc/passwd"], ["/"], ["/etc/passwd/x"]])
def test_what_cannot_be_run_is_final(do: Do, argv: list[str]) -> None:
    outcome = do(*argv)
    assert (outcome.code, outcome.retryable, outcome.result) == ("COMMAND_NOT_FOUND", False, None)
    assert argv[0] in (outcome.error or "")


def test_a_missing_folder_is_named(do: Do) -> None:
    outcome = do("true", cwd="/no/such/folder")
    assert outcome.code == "COMMAND_NOT_FOUND"
    assert "/no/such/folder" in (outcome.error or "")


def test_text_that_the_system_cannot_pass_on_is_final(do: Do) -> None:
    assert do("echo", "\ud800").code == "COMMAND_NOT_FOUND"


def test_too_many_arguments_may_fit_another_time(do: Do) -> None:
    outcome = do("true", "x" * 4_000_000)
    assert (outcome.code, outcome.retryable) == ("COMMAND_NOT_STARTED", True)


def test_only_the_last_4_kib_of_each_output_are_kept(do: Do) -> None:
    outcome = do(*python("import sys\nfor n in range(400): print(n, 'x' * 99); print(n, file=sys.stderr)"))
    assert len(outcome.result["stdout"]) == 4096
    assert outcome.result["stdout"].endswith("399 " + "x" * 99 + "\n")
    assert outcome.result["stderr"].endswith("\n399\n")


def test_endless_output_takes_no_memory(do: Do) -> None:
    code = "import os\nfor _ in range(1600): os.write(1, b'y' * 65536)\nos.write(2, b'done')"
    outcome = do(*python(code))
    assert outcome.result == {"exitCode": 0, "stdout": "y" * 4096, "stderr": "done"}


def test_output_can_be_stored(do: Do) -> None:
    assert do("printf", r"a\000\377").result["stdout"] == "a\ufffd\ufffd"


def test_the_environment_is_clean(do: Do, delivery: Delivery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEBELL_SECRET_KEY", "canary")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    seen = json.loads(do(*python(code), env={"PATH": "/mine", "COLOUR": "red"}).result["stdout"])
    seen.pop("LC_CTYPE", None)  # Python's own
    assert seen == {
        "PATH": "/mine",
        "LANG": "C.UTF-8",
        "COLOUR": "red",
        "TIMEBELL_JOB_ID": "0190-job",
        "TIMEBELL_TOPIC": "notifications.task-reminder",
        "TIMEBELL_SCHEDULED_AT": "2027-03-14T09:26:52Z",
        "TIMEBELL_ATTEMPT": "2",
        "TIMEBELL_OCCURRENCE_KEY": "occ_2W8c",
    }


def test_the_operator_may_give_another_environment(do: Do) -> None:
    target = CommandTarget(enabled=True, environment={"PATH": os.defpath, "HOME": "/home/x"})
    assert do("sh", "-c", "echo $HOME", target=target).result["stdout"] == "/home/x\n"


def test_it_runs_in_its_folder_and_in_a_session_of_its_own(do: Do, tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.getsid(0) == os.getpgid(0) == os.getpid())"
    assert do(*python(code), cwd=str(tmp_path)).result["stdout"] == f"{tmp_path.resolve()} True\n"


def test_without_stdin_it_reads_the_plain_body(do: Do, delivery: Delivery) -> None:
    code = "import sys, json; print(json.dumps(json.loads(sys.stdin.readline())))"
    assert json.loads(do(*python(code)).result["stdout"]) == facts(delivery)


@pytest.mark.parametrize("given", ["", "héllo\n", "x" * 4000])
def test_it_reads_the_stdin_it_was_given(do: Do, given: str) -> None:
    assert do("cat", stdin=given).result["stdout"] == given


def test_a_command_that_never_reads_is_no_error(do: Do) -> None:
    assert do("true", stdin="x" * 65_536).delivered


# --- Ending what was started -----------------------------------------------------------------------------


class Witness:
    """A named pipe that a process holds open as long as it lives."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "witness")
        os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._own_end = os.open(self.path, os.O_WRONLY)  # so that it does not end before it begins

    def said(self) -> str:
        """What comes next; empty once every process that held the pipe is gone. Blocks, for 10 s at most."""
        assert select.select([self._pipe], [], [], 10)[0]
        return os.read(self._pipe, 100).decode().strip()

    def release(self) -> None:
        os.close(self._own_end)

    def close(self) -> None:
        os.close(self._pipe)


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    made = Witness(tmp_path)
    yield made
    made.close()


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
    """Cancel a command once it is up and was fed."""
    options = target.check({"argv": ["sh", "-c", "read -r _" + script], "env": {"WITNESS": witness.path}})
    attempt = asyncio.create_task(target.deliver(delivery, options))
    assert await asyncio.to_thread(witness.said) == "up"
    for _ in range(times):
        attempt.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await attempt
    witness.release()


def test_cancellation_kills_grandchildren_that_ignore_sigterm(run: Run, delivery: Delivery, witness: Witness) -> None:
    run(cancelled(CommandTarget(enabled=True, grace=0.1), delivery, witness, STUBBORN, times=1))
    assert witness.said() == ""
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_cancellation_lets_the_polite_clean_up(run: Run, delivery: Delivery, witness: Witness) -> None:
    run(cancelled(CommandTarget(enabled=True, grace=10), delivery, witness, GENTLE, times=1))
    assert witness.said() == "ended"
    assert witness.said() == ""


def test_a_second_cancellation_does_not_wait_for_politeness(run: Run, delivery: Delivery, witness: Witness) -> None:
    run(cancelled(CommandTarget(enabled=True, grace=20), delivery, witness, STUBBORN, times=2))
    assert witness.said() == ""


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("turns", range(2, 10))
def test_cancellation_at_any_moment_of_the_start(
    run: Run, delivery: Delivery, witness: Witness, turns: int, times: int
) -> None:
    async def main() -> None:
        target = CommandTarget(enabled=True, grace=0.1)
        options = target.check({"argv": ["sh", "-c", STUBBORN], "env": {"WITNESS": witness.path}})
        attempt = asyncio.create_task(target.deliver(delivery, options))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert witness.said() == "up"  # the loop stands still at this turn until there is a grandchild
        for _ in range(times):
            attempt.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await attempt
        witness.release()
        assert await asyncio.to_thread(witness.said) == ""
        with suppress(ChildProcessError):  # which says that the event loop has waited for every child
            while True:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)

    run(main())


def test_what_a_finished_command_left_behind_is_ended(do: Do, witness: Witness) -> None:
    script = """trap '' TERM; exec 9>"$WITNESS"; (while :; do sleep 1000; done) & echo done"""
    target = CommandTarget(enabled=True, grace=0.1)
    outcome = do("sh", "-c", script, target=target, env={"WITNESS": witness.path})
    assert outcome.result["stdout"] == "done\n"
    witness.release()
    assert witness.said() == ""


def test_a_daemon_that_left_the_group_does_not_hold_up_the_job(do: Do) -> None:
    code = """
import os, signal
ready, told = os.pipe()
if (daemon := os.fork()) == 0:
    os.setsid(); os.write(told, b"x"); signal.pause()
os.read(ready, 1)
print(daemon)
"""
    outcome = do(*python(code), target=CommandTarget(enabled=True, grace=0.1))
    assert outcome.delivered
    os.kill(int(outcome.result["stdout"]), signal.SIGKILL)


# --- Options and settings ---------------------------------------------------------------------------------


def test_off_unless_turned_on(run: Run, delivery: Delivery) -> None:
    target = CommandTarget(enabled=False)
    with pytest.raises(Refused) as caught:
        target.check({"argv": ["true"]})
    assert caught.value.code == "COMMAND_TARGET_OFF"
    assert "TIMEBELL_COMMAND_ENABLED=true" in caught.value.fix
    outcome = run(target.deliver(delivery, {"argv": ["true"]}))
    assert (outcome.delivered, outcome.code, outcome.retryable) == (False, "COMMAND_TARGET_OFF", False)
    assert "TIMEBELL_COMMAND_ENABLED=true" in outcome.error


def test_options_are_filled_in() -> None:
    checked = CommandTarget(enabled=True).check({"argv": ["true"]})
    assert checked == {"argv": ["true"], "env": {}, "cwd": None, "stdin": None}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"argv": "ls -l"},
        {"argv": []},
        {"argv": [""]},
        {"argv": ["ls", 1]},
        {"argv": ["ls", "a\x00b"]},
        {"argv": ["ls"], "shell": True},
        {"argv": ["ls"], "env": ["A=b"]},
        {"argv": ["ls"], "env": {"A B": "c"}},
        {"argv": ["ls"], "env": {"A=B": "c"}},
        {"argv": ["ls"], "env": {"1A": "c"}},
        {"argv": ["ls"], "env": {"A": 1}},
        {"argv": ["ls"], "env": {"A": "b\x00"}},
        {"argv": ["ls"], "env": {"TIMEBELL_JOB_ID": "x"}},
        {"argv": ["ls"], "cwd": "relative"},
        {"argv": ["ls"], "cwd": 1},
        {"argv": ["ls"], "stdin": b"bytes"},
        {"argv": ["ls"], "stdin": "x" * 65_537},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        CommandTarget(enabled=True).check(options)
    assert caught.value.code == "TARGET_OPTIONS_INVALID"
