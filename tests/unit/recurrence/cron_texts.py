"""Hypothesis strategies for cron expressions of the whole grammar, with options."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from timebell.errors import InvalidRecurrence
from timebell.recurrence import Cron

Texts = st.SearchStrategy[str]


def _items(low: int, high: int) -> Texts:
    number = st.integers(low, high)
    spans = st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}")
    steps = st.tuples(spans, st.integers(1, high - low)).map(lambda pair: f"{pair[0]}/{pair[1]}")
    return st.one_of(number.map(str), spans, steps)


def _hashes(low: int, high: int) -> Texts:
    pairs = st.tuples(st.integers(low, high), st.integers(low, high))
    return st.one_of(
        st.just("H"),
        st.integers(1, high - low).map(lambda n: f"H/{n}"),
        pairs.map(lambda pair: f"H({min(pair)}-{max(pair)})"),
        pairs.map(lambda pair: f"H({min(pair)}-{max(pair)})/{max(1, (max(pair) - min(pair)) // 3)}"),
    )


def _field(low: int, high: int, *more: Texts, most: int | None = None) -> Texts:
    items = st.one_of(_items(low, high), _items(low, high), _hashes(low, most or high), *more)
    lists = st.lists(items, min_size=1, max_size=3).map(",".join)
    return st.one_of(st.just("*"), st.integers(1, high - low).map(lambda n: f"*/{n}"), lists)


_last = st.one_of(st.just("L"), st.integers(1, 30).map("L-{}".format))
_nearest = st.one_of(st.just("LW"), st.integers(1, 31).map("{}W".format), st.sampled_from(["1W", "31W"]))
_weekday = st.one_of(st.integers(0, 7).map(str), st.sampled_from(["sun", "MON", "Fri"]))
_nth = st.builds("{}#{}".format, _weekday, st.integers(1, 5))
minutes, hours, months = _field(0, 59), _field(0, 23), _field(1, 12)
dates = st.one_of(st.just("?"), _field(1, 31, _last, _nearest, most=28))
weekdays = st.one_of(st.just("?"), _field(0, 7, _nth, _weekday.map("{}L".format), most=6))
weekdays = st.one_of(weekdays, weekdays, weekdays.filter(lambda text: text != "?").map("+{}".format))
years = st.one_of(
    st.integers(1970, 2199).map(str),
    st.integers(1970, 2150).flatmap(lambda year: st.integers(year, year + 40).map(lambda end: f"{year}-{end}/2")),
    st.integers(1, 50).map(lambda n: f"*/{n}"),
    st.lists(st.integers(2000, 2080).map(str), min_size=1, max_size=3).map(",".join),
)
day_options = st.fixed_dictionaries(
    {},
    optional={
        "days": st.sampled_from(["and", "or"]),
        "month_end": st.sampled_from(["skip", "back"]),
        "hash_key": st.sampled_from(["", "a/b", "default/report"]),
    },
)
dst = st.fixed_dictionaries(
    {},
    optional={
        "gap": st.sampled_from(["end", "shift", "skip"]),
        "fold": st.sampled_from(["first", "last", "both"]),
    },
)
more = st.fixed_dictionaries(
    {}, optional={"wildcard": st.sampled_from(["real", "fixed"]), "allow_never": st.booleans()}
)
options = st.builds(lambda *parts: parts[0] | parts[1] | parts[2], day_options, dst, more)


@st.composite
def texts(draw: st.DrawFn) -> str:
    fields = [draw(minutes), draw(hours), draw(dates), draw(months), draw(weekdays)]
    if width := draw(st.sampled_from([0, 0, 1, 2])):
        fields = [draw(minutes), *fields, *([draw(years)] if width == 2 else [])]
    return " ".join(fields)


def cron(text: str, **options_given: Any) -> Cron | None:
    """Return the spec, or None if the expression never fires."""
    if "+" in text and options_given.get("days") == "or":
        del options_given["days"]
    if "H" in text:
        options_given.setdefault("hash_key", "")  # whether it fires may depend on the key
    try:
        return Cron(text, **options_given)
    except InvalidRecurrence as error:
        if error.code != "NEVER_FIRES":
            raise
        return None


@st.composite
def crons(draw: st.DrawFn) -> Cron:
    return cron(draw(texts()), **draw(options)) or Cron("0 0 29 2 *")
