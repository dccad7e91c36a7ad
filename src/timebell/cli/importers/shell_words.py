"""Split a shell command into words, if it is a single simple command whose words are known without running it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from timebell.cli.importers.entry import NotExpressible

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
_IGNORED_FAILURE = re.compile(r"\|\|\s*(?:true|:|/bin/true)\s*$")
_REDIRECTION = re.compile(r"(?:[0-9]*|&)(>>|>|<)(&?)\s*")
_OPERATORS = {
    "&&": "&& (a second command)", "||": "|| (a second command)", "|": "| (a pipe)", ";": "; (a second command)",
    "&": "& (in the background)", "(": "( (a subshell)", "\n": "a line break (a second command)",
}  # fmt: skip
_SUBSTITUTIONS = {"$(": "$(...) (the output of a command)", "`": "`...` (the output of a command)"}
_IGNORED_FILES = ("/dev/null", "/dev/stdout", "/dev/stderr")


@dataclass(slots=True)
class _Words:
    """The words so far, and the current one; None between words."""

    words: list[str] = field(default_factory=list)
    current: str | None = None

    def add(self, text: str) -> None:
        self.current = (self.current or "") + text

    def end(self) -> None:
        if self.current is not None:
            self.words.append(self.current)
        self.current = None


def split_command(command: str, env: Mapping[str, str]) -> list[str]:
    """Return the words of a simple command, with variables of `env` inserted, and without redirections to /dev/null.

    Raises NotExpressible for anything else, with its name.
    """
    text = _IGNORED_FAILURE.sub("", command.strip())
    words, position = _Words(), 0
    while position < len(text):
        position = _read_part(text, position, words, env)
    words.end()
    while words.words and _ASSIGNMENT.fullmatch(words.words[0]):
        raise NotExpressible(f"the variable {words.words[0].partition('=')[0]} is set for this command only")
    return words.words


def _read_part(text: str, position: int, words: _Words, env: Mapping[str, str]) -> int:
    """Read one part of a command at `position`; return the position after it."""
    char, two = text[position], text[position : position + 2]
    if char in " \t":
        words.end()
        return position + 1
    if char == "'":
        end = _find_end(text, position, "'")
        words.add(text[position + 1 : end])
        return end + 1
    if char == '"':
        return _read_double_quoted(text, position, words, env)
    if char == "\\":
        words.add(text[position + 1 : position + 2])
        return position + 2
    if char == "#" and words.current is None:
        return len(text)
    if (redirection := _match_redirection(text, position, words)) is not None:
        return _read_redirection(text, redirection)
    for operator in (two, char):
        if operator in _OPERATORS:
            raise NotExpressible(f"it contains {_OPERATORS[operator]}")
    if two in _SUBSTITUTIONS or char in _SUBSTITUTIONS or char == "$":
        return _read_variable(text, position, words, env, quoted=False)
    if char in "*~" and words.current is None:
        raise NotExpressible(f"it contains {char} (file names)")
    words.add(char)
    return position + 1


def _match_redirection(text: str, position: int, words: _Words) -> re.Match[str] | None:
    """Return a redirection at `position`; digits and & begin one only between words."""
    if text[position] not in "<>" and words.current is not None:
        return None
    return _REDIRECTION.match(text, position)


def _read_redirection(text: str, redirection: re.Match[str]) -> int:
    """Skip a redirection to /dev/null or between the outputs; return the position after it."""
    end = re.compile(r"[^\s;&|<>()]*").match(text, redirection.end())
    assert end is not None
    name = end[0].strip("\"'")
    if redirection[2] and (name.isdigit() or name == "-"):
        return end.end()
    if redirection[1] == "<" and name != "/dev/null":
        raise NotExpressible(f"it reads the file {name}")
    if name not in _IGNORED_FILES:
        raise NotExpressible(f"it writes to the file {name}: the response is stored with each job")
    return end.end()


def _read_double_quoted(text: str, position: int, words: _Words, env: Mapping[str, str]) -> int:
    words.add("")
    position += 1
    while True:
        if position >= len(text):
            raise NotExpressible('a " is not closed')
        char, following = text[position], text[position + 1 : position + 2]
        if char == '"':
            return position + 1
        if char == "\\" and following in '$`"\\\n':
            words.add("" if following == "\n" else following)
            position += 2
        elif char in "$`":
            position = _read_variable(text, position, words, env, quoted=True)
        else:
            words.add(char)
            position += 1


def _read_variable(text: str, position: int, words: _Words, env: Mapping[str, str], *, quoted: bool) -> int:
    """Insert the value of a variable; return the position after it."""
    for start, name in _SUBSTITUTIONS.items():
        if text.startswith(start, position):
            raise NotExpressible(f"it contains {name}")
    match = _VARIABLE.match(text, position)
    if match is None:
        if text[position + 1 : position + 2] in ("", " ", '"'):
            words.add("$")
            return position + 1
        raise NotExpressible(f"it contains {text[position : position + 12]!r} (an expansion)")
    name = match[1] or match[2]
    if name not in env:
        raise NotExpressible(f"the crontab does not set the variable {name}")
    value = env[name]
    if not quoted and (not value or re.search(r"[\s*?\[]", value)):
        raise NotExpressible(f"${name} is not quoted, and its value is empty or contains spaces or * ? [")
    words.add(value)
    return match.end()


def _find_end(text: str, position: int, quote: str) -> int:
    end = text.find(quote, position + 1)
    if end < 0:
        raise NotExpressible(f"a {quote} is not closed")
    return end
