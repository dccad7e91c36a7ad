"""What the contract settles for some pairs of policies: its words, and what becomes of which occurrences of the scene.

`at` has what became of planned occurrences, `manual` and `backfill` of those; `starts` the starts of attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RAN, OVERLAP, MISSED, COALESCED = "completed", "skipped (overlap)", "skipped (missed)", "skipped (coalesced)"
PAUSED, OVERRIDE, EXPIRED = "skipped (paused)", "skipped (override)", "skipped (expired)"
SUPERSEDED, HELD, NONE = "cancelled (superseded)", "pending (recover)", None
AWAY = ("00:08", "00:10", "00:12", "00:14", "00:16")  # missed; 00:18 is 20 s late when the node is back


@dataclass(frozen=True)
class Settled:
    """One pair."""

    pair: str
    words: str
    at: dict[str, str | None]
    manual: dict[str, str | None] = field(default_factory=dict)
    backfill: dict[str, str | None] = field(default_factory=dict)
    starts: dict[str, list[str]] = field(default_factory=dict)


def each(clocks: tuple[str, ...] | list[str], outcome: str | None) -> dict[str, str | None]:
    return dict.fromkeys(clocks, outcome)


QUEUES = "catch-up jobs queue one after another even under overlap skip"
SETTLED = [
    Settled("overlap=skip catch_up=latest", QUEUES + ", though a job is live and 00:18 is left out", {
        **each(AWAY[:-1], COALESCED), "00:16": RAN, "00:18": OVERLAP, "00:06": RAN, "23:52": OVERLAP, "00:26": OVERLAP,
    }, starts={"00:06": ["00:06", "00:18:20"], "00:16": ["00:18:21"]}),
    Settled("overlap=skip catch_up=all", QUEUES, each([*AWAY, "00:18"], RAN) | each(["23:52", "00:26"], OVERLAP)),
    Settled("overlap=skip catch_up=skip", "none is made up for", each(AWAY, MISSED) | {"00:18": OVERLAP}),
    Settled("overlap=queue catch_up=latest", "one that is not missed runs anyway and stands for the others", {
        **each(AWAY, COALESCED), **each(["00:18", "23:52", "00:26", "00:28"], RAN),
    }, starts={"00:26": ["00:29"], "00:28": ["00:29:01"]}),
    Settled("overlap=queue catch_up=all", QUEUES, each([*AWAY, "00:18", "23:52", "00:26"], RAN)),
    Settled("overlap=allow catch_up=all", "each fires, beside the others", each([*AWAY, "00:18"], RAN), starts={
        "00:08": ["00:18:20"], "00:16": ["00:18:20"], "00:18": ["00:18:20"], "23:52": ["23:52"],
    }),
    Settled("overlap=cancel_previous catch_up=all", "what is made up for makes nobody stop, later ones do",
            {**each([*AWAY, "00:18", "00:06"], RAN), **each(["23:50", "00:24"], SUPERSEDED)}),
    Settled("overlap=cancel_previous catch_up=latest", "the newest one makes the live one stop",
            {**each(AWAY, COALESCED), "00:06": SUPERSEDED, "00:18": RAN}),
    Settled("catch_up=all lateness=anchored", "an anchored reminder is void when late",
            {**each(AWAY, EXPIRED), "00:18": OVERLAP}),
    Settled("overlap=allow lateness=anchored", "below missed_after each one fires, though anchored", {"00:18": RAN}),
    Settled("lateness=anchored missed_after", "missed by a shorter measure", each([*AWAY, "00:18"], EXPIRED)),
    Settled("lateness=state missed_after", "the newest missed one runs", each(AWAY, COALESCED) | {"00:18": RAN}),
    Settled("catch_up=skip missed_after", "missed when later than missedAfter", each([*AWAY, "00:18"], MISSED)),
    Settled("catch_up=all catch_up_window", "none from before the window",
            each(AWAY[:3], MISSED) | each(AWAY[3:], RAN)),
    Settled("catch_up=latest catch_up_window", "coalesced within the window, missed before it",
            each(AWAY[:3], MISSED) | {"00:14": COALESCED, "00:16": RAN}),
    Settled("catch_up=all catch_up_limit", "the newest of them, up to the limit",
            each(AWAY[:3], MISSED) | each(AWAY[3:], RAN)),
    Settled("catch_up=all catch_up_pace", "kept apart", each(AWAY, RAN), starts={
        "00:10": ["00:18:50"], "00:12": ["00:19:20"],
    }),
    Settled("catch_up=all hold_above", "a backlog larger than holdAbove waits for recover",
            {**each(AWAY, HELD), "00:20": RAN, "00:30": RAN}),
    Settled("hold_above recover", "until it is let go", {"00:16": RAN}, starts={"00:16": ["00:36:01"]}),
    Settled("catch_up=all skip", "an override stands, though a missed one would run",
            {**each(["00:12", "23:52", "00:26"], OVERRIDE), "00:10": RAN}),
    Settled("catch_up=all move", "what is moved is made up for where it is moved to",
            {"00:14": OVERRIDE, "00:15": RAN, "23:56": OVERRIDE, "23:57": RAN, "00:28": OVERRIDE}),
    Settled("catch_up=skip move", "and missed there", {"00:14": OVERRIDE, "00:15": MISSED}),
    Settled("overlap=skip undo", "as if it had never been skipped", {"23:58": RAN, "00:16": RAN}),
    Settled("skip move", "one by one", {"23:52": OVERRIDE, "23:56": OVERRIDE, "23:57": RAN}),
    Settled("catch_up=all expires_after", "past expires_after: never started -> skipped, attempted -> failed",
            {**each(AWAY, EXPIRED), "00:06": "failed (expired)", "00:18": RAN}),
    Settled("overlap=queue expires_after", "also of what waits for its turn", {"00:26": EXPIRED, "00:28": RAN}),
    Settled("overlap=queue timeout", "a try that takes too long is tried again, and others wait for it",
            {"23:50": RAN, "23:52": RAN, "00:26": RAN}),
    Settled("overlap=queue pause", "a pause fires nothing that falls in it; what waits from before goes on",
            {"00:24": RAN, **each(["00:26", "00:28", "00:30", "00:32"], PAUSED), "00:34": RAN}),
    Settled("overlap=skip resume(catch_up=True)", "unless asked on resume: then catch-up decides",
            {**each(["00:26", "00:28", "00:30"], COALESCED), "00:32": RAN}),
    Settled("catch_up=all resume(catch_up=True)", "unless asked on resume", each(["00:26", "00:28", "00:30"], RAN)),
    Settled("catch_up=skip resume(catch_up=True)", "catch-up says no", each(["00:26", "00:30", "00:32"], MISSED)),
    Settled("lateness=anchored resume(catch_up=True)", "void when late", each(["00:26", "00:30", "00:32"], EXPIRED)),
    Settled("pause skip", "left out on purpose before it was paused", {"00:26": OVERRIDE, "00:28": PAUSED}),
    Settled("pause move", "so is the instant it was moved to", {"00:28": OVERRIDE, "00:29": PAUSED}),
    Settled("pause edit", "an edit fires nothing, and what is missed or paused is judged per revision",
            {**each(["00:26", "00:30", "00:33"], PAUSED), "00:32": NONE, "00:35": RAN}),
    Settled("pause trigger", "a trigger is by hand: also in a pause", {"00:30": PAUSED}, manual={"00:39": RAN}),
    Settled("overlap=skip trigger", "trigger-now obeys overlap and moves nothing", {"00:38": RAN, "00:40": RAN},
            manual={"00:27": OVERLAP, "00:39": RAN}),
    Settled("overlap=queue trigger", "it waits its turn", {"00:26": RAN, "00:28": RAN},
            manual={"00:27": RAN, "00:39": RAN}),
    Settled("overlap=cancel_previous trigger", "it makes the live one stop", {"00:24": SUPERSEDED},
            manual={"00:27": RAN}),
    Settled("overlap=allow trigger", "beside it", {"00:24": RAN}, manual={"00:27": RAN}),
    Settled("overlap=skip backfill", "one after another even under skip, and never what ran", {"23:52": OVERLAP},
            backfill=each(["23:30", "23:44", "23:52", "00:08", "00:18"], RAN) | each(["23:46", "00:16"], NONE)),
    Settled("overlap=allow backfill", "never what ran", {"23:52": RAN},
            backfill={"23:52": NONE, "00:16": RAN, "23:30": RAN}),
    Settled("backfill skip", "nor what was left out on purpose", {"23:52": OVERRIDE},
            backfill=each(["23:52", "00:12", "00:26"], NONE) | {"00:10": RAN}),
    Settled("backfill pause", "also what a pause left out", {"00:26": PAUSED}, backfill=each(["00:26", "00:32"], RAN)),
    Settled("overlap=skip backoff=fixed", "a job that waits for its next try is live",
            {"23:54": RAN, "23:56": OVERLAP, "00:36": OVERLAP}),
    Settled("overlap=cancel_previous backoff=fixed", "and makes way", {"23:54": SUPERSEDED, "23:56": RAN}),
    Settled("overlap=queue Snooze", "the snoozed one keeps its turn", {"23:58": RAN, "00:00": RAN}, starts={
        "23:58": ["23:58", "00:00:30"], "00:00": ["00:00:31"],
    }),
    Settled("overlap=cancel_previous Snooze", "the snoozed one makes way", {"23:58": SUPERSEDED, "00:00": RAN}),
    Settled("overlap=skip Snooze", "the snoozed one is live", {"23:58": RAN, "00:00": OVERLAP}),
    Settled("overlap=queue cancel", "cancelled while running: a success that arrives is one", {"00:24": RAN}),
    Settled("overlap=queue Cancel", "an attempt that ends itself lets the next go", {"00:04": RAN}),
    Settled("overlap=skip pause_all", "one switch stops all firing; afterwards as after an outage",
            {**each(["00:24", "00:26", "00:28"], COALESCED), "00:30": RAN}),
    Settled("overlap=skip pause_queue", "what waits in a paused queue is live",
            {"00:24": RAN, **each(["00:26", "00:32"], OVERLAP)}),
    Settled("overlap=cancel_previous pause_queue", "and makes way without having run",
            {**each(["00:24", "00:26", "00:30"], SUPERSEDED), "00:32": RAN}),
    Settled("overlap=skip unheard=hold", "held until a listener appears, and live meanwhile",
            {"23:46": RAN, "23:48": OVERLAP, "00:20": OVERLAP}, starts={"23:46": ["00:20:30"]}),
    Settled("overlap=skip unheard=complete", "recorded completed, with nobody waiting", {"23:46": RAN, "23:48": RAN},
            starts={"23:46": []}),
    Settled("overlap=allow unheard=hold", "each runs as soon as somebody listens", {"23:46": RAN, "23:48": RAN},
            starts={"23:46": ["00:20:30"], "23:48": ["00:20:30"]}),
    Settled("overlap=queue delete", "what waits is cancelled, nothing fires afterwards", {"00:44": RAN, "00:46": NONE}),
    Settled("overlap=skip edit", "an edit never fires by itself", {"00:30": RAN, "00:32": NONE, "00:33": RAN}),
    Settled("overlap=skip revert", "nor does a revert", {"00:41": RAN, "00:43": RAN, "00:44": RAN, "00:45": NONE}),
    Settled("end catch_up=all", "the end of the schedule", {"00:08": RAN, "00:40": RAN, "00:42": NONE}),
    Settled("start skip", "its start", {"23:48": NONE, "23:50": RAN, "23:52": OVERRIDE}),
    Settled("max_runs skip", "an occurrence that is skipped is one of them",
            {"23:52": OVERRIDE, "00:44": RAN, "00:46": NONE}),
    Settled("roll=skip catch_up=all", "on days off there is none", {"23:58": NONE, "00:08": RAN}),
    Settled("enabled catch_up=all", "made paused", {"23:46": PAUSED, "23:54": PAUSED, "23:56": RAN}),
    Settled("lateness=anchored queue(concurrency)", "void when it waited too long for a place", {"00:30": EXPIRED}),
]  # fmt: skip
