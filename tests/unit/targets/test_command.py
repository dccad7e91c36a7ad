"""The command target with real processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from timebell.errors import InvalidInput, Refused
from timebell.targets.base import Delivery, Outcome, event_fields
from timebell.targets.command import CommandTarget

Run = Callable[[Any], Any]
Do = Callable[..., Outcome]


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


def test_exit_status_zero_is_delivered_with_its_output(do: Do) -> None:
    outcome = do("sh", "-c", "echo out; echo err >&2")
    assert outcome == Outcome.ok({"exitCode": 0, "stdout": "out\n", "stderr": "err\n"})


@pytest.mark.parametrize("status", [1, 2, 126, 255])
def test_other_exit_status_is_a_retryable_failure(do: Do, status: int) -> None:
    outcome = do("sh", "-c", f"echo why >&2; exit {status}")
    assert (outcome.code, outcome.retryable) == ("EXIT_STATUS", True)
    assert outcome.result == {"exitCode": status, "stdout": "", "stderr": "why\n"}
    assert outcome.error == f"The command exited with {status}."


def test_termination_by_signal_is_a_failure(do: Do) -> None:
    outcome = do("sh", "-c", "kill -9 $$")
    assert (outcome.code, outcome.result["exitCode"]) == ("EXIT_STATUS", -9)
    assert outcome.error == "The command was terminated by signal 9."


def test_arguments_are_not_interpreted_by_a_shell(do: Do) -> None:
    assert do("printf", "%s|", "a b", "$(id)", "*", "; ls").result["stdout"] == "a b|$(id)|*|; ls|"


@pytest.mark.parametrize("argv", [["/no/such/program"], ["no-such-program"], ["/etc/passwd"], ["/"], ["/etc/passwd/x"]])
def test_missing_or_non_executable_program_is_a_final_failure(do: Do, argv: list[str]) -> None:
    outcome = do(*argv)
    assert (outcome.code, outcome.retryable, outcome.result) == ("COMMAND_NOT_FOUND", False, None)
    assert argv[0] in (outcome.error or "")


def test_missing_working_directory_is_named(do: Do) -> None:
    outcome = do("true", cwd="/no/such/folder")
    assert outcome.code == "COMMAND_NOT_FOUND"
    assert "/no/such/folder" in (outcome.error or "")


def test_unencodable_argument_is_a_final_failure(do: Do) -> None:
    assert do("echo", "\ud800").code == "COMMAND_NOT_FOUND"


def test_oversized_arguments_are_a_retryable_failure(do: Do) -> None:
    outcome = do("true", "x" * 4_000_000)
    assert (outcome.code, outcome.retryable) == ("COMMAND_NOT_STARTED", True)


def test_only_the_last_4_kib_of_each_output_are_kept(do: Do) -> None:
    outcome = do(*python("import sys\nfor n in range(400): print(n, 'x' * 99); print(n, file=sys.stderr)"))
    assert len(outcome.result["stdout"]) == 4096
    assert outcome.result["stdout"].endswith("399 " + "x" * 99 + "\n")
    assert outcome.result["stderr"].endswith("\n399\n")


def test_long_output_is_bounded(do: Do) -> None:
    code = "import os\nfor _ in range(1600): os.write(1, b'y' * 65536)\nos.write(2, b'done')"
    outcome = do(*python(code))
    assert outcome.result == {"exitCode": 0, "stdout": "y" * 4096, "stderr": "done"}


def test_binary_output_can_be_stored(do: Do) -> None:
    assert do("printf", r"a\000\377").result["stdout"] == "a\ufffd\ufffd"


def test_command_environment_contains_no_secrets(do: Do, delivery: Delivery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEBELL_SECRET_KEY", "canary")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    environment = json.loads(do(*python(code), env={"PATH": "/mine", "COLOUR": "red"}).result["stdout"])
    environment.pop("LC_CTYPE", None)  # Python's own
    assert environment == {
        "PATH": "/mine",
        "LANG": "C.UTF-8",
        "COLOUR": "red",
        "TIMEBELL_JOB_ID": "0190-job",
        "TIMEBELL_TOPIC": "notifications.task-reminder",
        "TIMEBELL_SCHEDULED_AT": "2027-03-14T09:26:52Z",
        "TIMEBELL_ATTEMPT": "2",
        "TIMEBELL_OCCURRENCE_KEY": "occ_2W8c",
    }


def test_operator_may_configure_the_environment(do: Do) -> None:
    target = CommandTarget(enabled=True, environment={"PATH": os.defpath, "HOME": "/home/x"})
    assert do("sh", "-c", "echo $HOME", target=target).result["stdout"] == "/home/x\n"


def test_command_runs_in_its_directory_and_its_own_session(do: Do, tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.getsid(0) == os.getpgid(0) == os.getpid())"
    assert do(*python(code), cwd=str(tmp_path)).result["stdout"] == f"{tmp_path.resolve()} True\n"


def test_default_stdin_is_the_plain_body(do: Do, delivery: Delivery) -> None:
    code = "import sys, json; print(json.dumps(json.loads(sys.stdin.readline())))"
    assert json.loads(do(*python(code)).result["stdout"]) == event_fields(delivery)


@pytest.mark.parametrize("stdin", ["", "héllo\n", "x" * 4000])
def test_configured_stdin_is_passed_to_the_command(do: Do, stdin: str) -> None:
    assert do("cat", stdin=stdin).result["stdout"] == stdin


def test_command_that_ignores_stdin_is_delivered(do: Do) -> None:
    assert do("true", stdin="x" * 65_536).delivered


def test_command_target_is_disabled_by_default(run: Run, delivery: Delivery) -> None:
    target = CommandTarget(enabled=False)
    with pytest.raises(Refused) as caught:
        target.check({"argv": ["true"]})
    assert caught.value.code == "COMMAND_TARGET_OFF"
    assert "TIMEBELL_COMMAND_ENABLED=true" in caught.value.fix
    outcome = run(target.deliver(delivery, {"argv": ["true"]}))
    assert (outcome.delivered, outcome.code, outcome.retryable) == (False, "COMMAND_TARGET_OFF", True)
    assert "TIMEBELL_COMMAND_ENABLED=true" in outcome.error


def test_missing_options_get_defaults() -> None:
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
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        CommandTarget(enabled=True).check(options)
    assert caught.value.code == "INVALID_TARGET_OPTIONS"
