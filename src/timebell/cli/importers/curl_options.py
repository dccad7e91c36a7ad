"""The options of curl and wget, and what they mean for a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote_plus

from timebell.cli.importers.entry import NotExpressible
from timebell.durations import parse_duration
from timebell.targets.http_options import MAX_TIMEOUT_SECONDS


@dataclass(slots=True)
class RequestDraft:
    """The request that results from the options read so far."""

    stdin: str
    urls: list[str] = field(default_factory=list)
    method: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    data: list[str] = field(default_factory=list)
    form: dict[str, list[str]] = field(default_factory=dict)
    is_json: bool = False
    data_in_query: bool = False
    user: str | None = None
    bearer: str | None = None
    proxy: str | None = None
    proxy_user: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    timeout: float = MAX_TIMEOUT_SECONDS
    retries: int = 0
    retry_delay: float | None = None
    follows_redirects: bool = False
    discards_output: bool = True


Apply = Callable[[RequestDraft, str], None]

DEFAULT_HEADERS = ("accept", "content-type", "host", "user-agent")
"""Headers that a request has unless an option removes them."""

REFUSED = {
    name: text.format(name)
    for names, text in (
        (("-k", "--insecure", "--no-check-certificate"),
         "{} turns off the verification of certificates: use --cacert (wget: --ca-certificate) instead"),
        (("-O", "--remote-name", "-D", "--dump-header", "-c", "--cookie-jar"),
         "{} writes a file: the response is stored with each job"),
        (("-T", "--upload-file", "-K", "--config", "-n", "--netrc", "-i", "--input-file", "--post-file", "--body-file"),
         "{} reads a file when the job runs"),
    )
    for name in names
}  # fmt: skip


def _add_header(draft: RequestDraft, text: str) -> None:
    if text.startswith("@"):
        raise NotExpressible("-H @file reads a file when the job runs")
    name, separator, value = text.partition(":")
    name, value = name.strip().lower(), value.strip()
    if not separator:
        raise NotExpressible(f"the header {text!r} has no value")
    if not value and name in DEFAULT_HEADERS:
        raise NotExpressible(f"it removes the header {name}")
    if name in draft.headers:
        raise NotExpressible(f"it sends the header {name} twice")
    if value:
        draft.headers[name] = value


def _add_data(draft: RequestDraft, text: str) -> None:
    draft.data.append(_read_data(draft, text).replace("\r", "").replace("\n", "") if text[:1] == "@" else text)


def _add_raw(draft: RequestDraft, text: str) -> None:
    draft.data.append(text)


def _add_binary(draft: RequestDraft, text: str) -> None:
    draft.data.append(_read_data(draft, text))


def _read_data(draft: RequestDraft, text: str) -> str:
    """Return the data of an option; `@-` is the text after % in the crontab."""
    if text == "@-":
        return draft.stdin
    if text.startswith("@"):
        raise NotExpressible(f"it sends the file {text[1:]}, which is read when the job runs")
    return text


def _add_encoded(draft: RequestDraft, text: str) -> None:
    name, separator, value = text.partition("=")
    if "@" in name or (not separator and "@" in text):
        raise NotExpressible("--data-urlencode name@file reads a file when the job runs")
    draft.data.append(f"{name}={quote_plus(value)}" if separator and name else quote_plus(value if separator else text))


def _add_json(draft: RequestDraft, text: str) -> None:
    draft.data.append(_read_data(draft, text))
    draft.is_json = True


def _add_form_field(draft: RequestDraft, text: str) -> None:
    name, separator, value = text.partition("=")
    if not separator or value[:1] in ("@", "<"):
        raise NotExpressible(f"-F {text.partition('=')[0]} sends a file, which is read when the job runs")
    if ";type=" in value or ";filename=" in value:
        raise NotExpressible("-F with ;type= or ;filename= has no equivalent")
    draft.form.setdefault(name, []).append(value)


def _add_form_text(draft: RequestDraft, text: str) -> None:
    name, separator, value = text.partition("=")
    if not separator:
        raise NotExpressible("--form-string needs name=value")
    draft.form.setdefault(name, []).append(value)


def _set(attribute: str, value: Any = None) -> Apply:
    """Return the function of an option that sets one attribute, to its value or to a constant."""
    return lambda draft, text: setattr(draft, attribute, text if value is None else value)


def _set_header(name: str) -> Apply:
    return lambda draft, text: draft.headers.__setitem__(name, text)


def _set_file(name: str) -> Apply:
    return lambda draft, text: draft.files.__setitem__(name, text)


def _set_timeout(draft: RequestDraft, text: str) -> None:
    seconds = parse_duration(text)
    if seconds is None:
        raise NotExpressible(f"the timeout {text!r} is not a number")
    if seconds:
        draft.timeout = min(draft.timeout, seconds)


def _set_retries(extra: int) -> Apply:
    """Return the function of an option for retries; `extra` is added to its value."""

    def apply(draft: RequestDraft, text: str) -> None:
        if not text.isascii() or not text.isdigit() or int(text) > 100 or int(text) + extra < 0:
            raise NotExpressible(f"{text} retries have no equivalent: use 0 to 100")
        draft.retries = int(text) + extra

    return apply


def _set_retry_delay(draft: RequestDraft, text: str) -> None:
    draft.retry_delay = parse_duration(text)


def _set_output(draft: RequestDraft, text: str) -> None:
    if text not in ("-", "/dev/null", "/dev/stdout", "NUL"):
        raise NotExpressible(f"it writes to the file {text}: the response is stored with each job")
    draft.discards_output = True


def _check_log(draft: RequestDraft, text: str) -> None:
    if text not in ("-", "/dev/null", "/dev/stdout", "/dev/stderr"):
        raise NotExpressible(f"it writes to the file {text}: the log of a run is stored with each job")


def _set_cookie(draft: RequestDraft, text: str) -> None:
    if "=" not in text:
        raise NotExpressible("-b reads cookies from a file when the job runs")
    draft.headers["cookie"] = text


def _set_head(draft: RequestDraft, text: str) -> None:
    draft.method, draft.discards_output = draft.method or "HEAD", True


def _set_wget_user(draft: RequestDraft, text: str) -> None:
    draft.user = f"{text}:{(draft.user or ':').partition(':')[2]}"


def _set_wget_password(draft: RequestDraft, text: str) -> None:
    draft.user = f"{(draft.user or ':').partition(':')[0]}:{text}"


def _add_url(draft: RequestDraft, text: str) -> None:
    draft.urls.append(text)


class Syntax(NamedTuple):
    """The options of a program, without and with a value; None for options that make no difference here."""

    flags: dict[str, Apply | None]
    valued: dict[str, Apply | None]


def _options(*pairs: tuple[str, Apply | None]) -> dict[str, Apply | None]:
    return {name: apply for names, apply in pairs for name in names.split()}


CURL = Syntax(
    flags=_options(
        ("-s --silent -S --show-error -v --verbose -i --include --no-progress-meter -# --progress-bar -N", None),
        ("--no-buffer -f --fail --fail-with-body --fail-early --compressed -g --globoff --tcp-nodelay", None),
        ("--no-keepalive -4 --ipv4 --http1.1 --http2 --tlsv1.2 --tlsv1.3 --retry-connrefused", None),
        ("--retry-all-errors --basic -q --disable", None),
        ("-L --location", _set("follows_redirects", True)), ("-G --get", _set("data_in_query", True)),
        ("-I --head", _set_head),
    ),
    valued=_options(
        ("-w --write-out --connect-timeout --retry-max-time --max-redirs --proto -y --speed-time", None),
        ("-Y --speed-limit", None),
        ("-X --request", _set("method")), ("-H --header", _add_header), ("-d --data --data-ascii", _add_data),
        ("--data-binary", _add_binary), ("--data-raw", _add_raw), ("--data-urlencode", _add_encoded),
        ("--json", _add_json), ("-F --form", _add_form_field), ("--form-string", _add_form_text),
        ("-u --user", _set("user")), ("--oauth2-bearer", _set("bearer")), ("-b --cookie", _set_cookie),
        ("-A --user-agent", _set_header("user-agent")), ("-e --referer", _set_header("referer")),
        ("-m --max-time", _set_timeout), ("--retry", _set_retries(0)), ("--retry-delay", _set_retry_delay),
        ("-o --output", _set_output), ("-x --proxy", _set("proxy")), ("-U --proxy-user", _set("proxy_user")),
        ("--cacert", _set_file("ca")), ("-E --cert", _set_file("certificate")), ("--key", _set_file("key")),
        ("--url", _add_url),
    ),
)  # fmt: skip
WGET = Syntax(
    flags=_options(
        ("-q --quiet -v --verbose -nv --no-verbose -4 --inet4-only --no-cache --no-cookies --no-dns-cache", None),
        ("-S --server-response --no-proxy -nc -nd --content-on-error --auth-no-challenge --retry-connrefused", None),
        ("--spider", _set_head), ("--delete-after", _set("discards_output", True)),
    ),
    valued=_options(
        ("--connect-timeout --dns-timeout -w --wait --max-redirect --waitretry", None),
        ("-O --output-document", _set_output), ("-o --output-file -a --append-output", _check_log),
        ("--header", _add_header), ("--post-data --body-data", _add_raw),
        ("--method", _set("method")), ("--user --http-user", _set_wget_user),
        ("--password --http-password", _set_wget_password), ("-U --user-agent", _set_header("user-agent")),
        ("--referer", _set_header("referer")), ("-T --timeout --read-timeout", _set_timeout),
        ("-t --tries", _set_retries(-1)), ("--ca-certificate", _set_file("ca")),
        ("--certificate", _set_file("certificate")), ("--private-key", _set_file("key")),
    ),
)  # fmt: skip
