"""Translate commands of curl and wget to options of http targets, or report why that is impossible."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from timebell.cli.importers.curl_options import CURL, REFUSED, WGET, RequestDraft, Syntax
from timebell.cli.importers.entry import NotExpressible
from timebell.cli.importers.shell_words import split_command
from timebell.model.policy import Backoff, Retry

SECRET_HEADERS = re.compile(r"authorization|cookie|.*(?:key|token|secret|password|signature).*", re.IGNORECASE)
FORM = "application/x-www-form-urlencoded"
MAX_SUCCESS = ["2xx", "3xx"]
"""What curl -f accepts, too."""
_DURATION_OF_TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


@dataclass(slots=True)
class HttpCommand:
    """A request that a command sends: options of the target, the values of its secrets by name, and its retries."""

    options: dict[str, Any]
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    retry: Retry = field(default_factory=lambda: Retry(attempts=1))


def parse_http_command(command: str, env: Mapping[str, str], stdin: str) -> HttpCommand | None:
    """Return the request of a curl or wget command; None for other commands.

    Raises NotExpressible with the part that cannot be translated.
    """
    if not re.search(r"(?:^|[\s/;&|(])(?:curl|wget)\s", command):
        return None
    words = split_command(command, env)
    draft = RequestDraft(stdin)
    words = _skip_wrappers(words, draft)
    program = os.path.basename(words[0]) if words else ""
    if program not in ("curl", "wget"):
        return None
    if program == "wget":
        draft.follows_redirects, draft.discards_output = True, False
    _read_options(words[1:], draft, CURL if program == "curl" else WGET, program)
    if not draft.discards_output:
        raise NotExpressible("wget writes a file: add -O /dev/null or --spider if only the request matters")
    return _finish(draft)


def _skip_wrappers(words: list[str], draft: RequestDraft) -> list[str]:
    """Return the command without timeout, nice and env in front of it."""
    while words:
        name = os.path.basename(words[0])
        if name == "timeout" and len(words) > 2 and (limit := _DURATION_OF_TIMEOUT.fullmatch(words[1])):
            draft.timeout = min(
                draft.timeout, float(limit[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[limit[2]]
            )
            words = words[2:]
        elif name == "nice":
            words = words[3:] if words[1:2] == ["-n"] else words[1:]
            words = words[1:] if words and re.fullmatch(r"-n?-?\d+", words[0]) else words
        elif name == "env" and len(words) > 1 and not words[1].startswith("-") and "=" not in words[1]:
            words = words[1:]
        else:
            break
    return words


def _read_options(words: Sequence[str], draft: RequestDraft, syntax: Syntax, program: str) -> None:
    """Apply the options of a command to the draft. Raises NotExpressible for an unknown one."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--" or not word.startswith("-") or word == "-":
            draft.urls += rest if word == "--" else [word]
            rest = [] if word == "--" else rest
            continue
        if word.startswith("--"):
            name, separator, value = word.partition("=") if program == "wget" else (word, "", "")
            _apply_option(name, value if separator else None, rest, draft, syntax)
            continue
        cluster = word[1:]
        while cluster:
            long_cluster = program == "wget" and cluster[:2] in ("nv", "nc", "nd")
            name, cluster = ("-" + cluster[:2], cluster[2:]) if long_cluster else ("-" + cluster[0], cluster[1:])
            if name in syntax.valued:
                _apply_option(name, cluster or None, rest, draft, syntax)
                break
            _apply_option(name, None, rest, draft, syntax)


def _apply_option(name: str, value: str | None, rest: list[str], draft: RequestDraft, syntax: Syntax) -> None:
    if name in syntax.flags:
        apply, value = syntax.flags[name], ""
    elif name in syntax.valued:
        apply = syntax.valued[name]
        if value is None and not rest:
            raise NotExpressible(f"{name} has no value")
        value = rest.pop(0) if value is None else value
    else:
        raise NotExpressible(REFUSED.get(name, f"{name} has no equivalent"))
    if apply is not None:
        apply(draft, value)


def _finish(draft: RequestDraft) -> HttpCommand:
    """Return the request of a complete draft."""
    url, user = _parse_url(draft)
    found = HttpCommand({"url": url})
    options, headers = found.options, draft.headers
    content_type = headers.pop("content-type", None)
    if draft.data and draft.form:
        raise NotExpressible("-d and -F exclude each other")
    has_body = bool(draft.data) or bool(draft.form)
    if draft.data_in_query:
        if draft.form:
            raise NotExpressible("-G and -F exclude each other")
        if draft.data:
            options["url"] += ("&" if "?" in url else "?") + "&".join(draft.data)
        has_body = False
    options["method"] = draft.method or ("POST" if has_body else "GET")
    options["signed"] = False
    if draft.form:
        options |= {"body": "multipart", "template": {name: _escape(values) for name, values in draft.form.items()}}
    elif has_body:
        default = "application/json" if draft.is_json else FORM
        text = ("" if draft.is_json else "&").join(draft.data)
        options |= {"body": "text", "template": _escape(text), "contentType": content_type or default}
    else:
        options["body"] = "none"
    if draft.is_json:
        headers.setdefault("accept", "application/json")
    headers.setdefault("accept", "*/*")
    options |= {"timeout": draft.timeout, "success": list(MAX_SUCCESS)}
    if draft.follows_redirects:
        options["followRedirects"] = True
    _add_credentials(found, draft, user)
    _add_tls_and_proxy(found, draft)
    options["headers"] = {
        name: _secret(found, f"header-{name}", value) if SECRET_HEADERS.fullmatch(name) else value
        for name, value in headers.items()
    }  # fmt: skip
    if draft.retries:
        delay = draft.retry_delay
        found.retry = Retry(
            attempts=draft.retries + 1, delay=delay or 1.0, backoff=Backoff.FIXED if delay else Backoff.EXPONENTIAL
        )
    return found


def _parse_url(draft: RequestDraft) -> tuple[str, str | None]:
    """Return the URL without user, and the user. Raises NotExpressible unless there is exactly one."""
    if len(draft.urls) != 1:
        raise NotExpressible(f"it requests {len(draft.urls)} URLs: write one line for each")
    url = draft.urls[0] if "://" in draft.urls[0] else f"http://{draft.urls[0]}"
    if re.search(r"[{}\[\]]", url):
        raise NotExpressible("its URL contains { } [ ], which curl expands")
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https"):
        raise NotExpressible(f"its URL is {parts.scheme}, not http or https")
    user, separator, host = parts.netloc.rpartition("@")
    if separator and ":" not in user:
        user += ":"
    return urlunsplit(parts._replace(netloc=host, fragment="")), unquote(user) if separator else None


def _add_credentials(found: HttpCommand, draft: RequestDraft, url_user: str | None) -> None:
    user = draft.user or url_user
    if (draft.bearer or user) and "authorization" in draft.headers:
        raise NotExpressible("it has both credentials and a header Authorization")
    if draft.bearer is not None:
        found.options["auth"] = {"type": "bearer", "token": _secret(found, "token", draft.bearer)}
    elif user is not None:
        name, separator, password = user.partition(":")
        if not separator or user == ":":
            raise NotExpressible("-u has no password, so curl would ask for it")
        found.options["auth"] = {  # without a password, the name is an API key
            "type": "basic", "username": name if password else _secret(found, "username", name),
            "password": _secret(found, "password", password) if password else "",
        }  # fmt: skip


def _add_tls_and_proxy(found: HttpCommand, draft: RequestDraft) -> None:
    if draft.files:
        files = draft.files
        if "certificate" in files and "key" not in files:  # one file may contain both
            files["key"] = files["certificate"]
        tls: dict[str, Any] = {name: _read_pem(path) for name, path in files.items()}
        if "key" in tls:
            tls["key"] = _secret(found, "client-key", tls["key"])
        found.options["tls"] = tls
    if draft.proxy is not None:
        parts = urlsplit(draft.proxy if "://" in draft.proxy else f"http://{draft.proxy}")
        user, _, host = parts.netloc.rpartition("@")
        proxy: dict[str, Any] = {"url": f"{parts.scheme}://{host if ':' in host else f'{host}:1080'}"}
        name, _, password = (draft.proxy_user or unquote(user)).partition(":")
        if name:
            proxy |= {"username": name, "password": _secret(found, "proxy-password", password)}
        found.options["proxy"] = proxy


def _read_pem(path: str) -> str:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise NotExpressible(f"the file {path} cannot be read here: {error}") from error
    if "-----BEGIN" not in text:
        raise NotExpressible(f"the file {path} is not PEM")
    return text


def _secret(found: HttpCommand, name: str, value: str) -> dict[str, str]:
    """Store a confidential value of the command as a secret; return the reference to it."""
    found.secrets[name] = value
    return {"secret": name}


def _escape(value: Any) -> Any:
    """Return text with braces as a template has to contain them."""
    if isinstance(value, list):
        return [_escape(each) for each in value]
    return re.sub(r"\{\{|\}\}", lambda braces: f"{{{{'{braces[0]}'}}}}", value)
