"""What the demo reports: a row per round and the SLO attainment, as table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from ampd.cli.output import Column, megabytes, percent, plain, seconds
from ampd.cli.views import View, reason_name, route_name
from ampd.core.model import RoundTimings, Slo
from ampd.core.slo import Attainment, attainment
from ampd.v1.session_service_pb2 import RoundFinished, RoundPlaced
from ampd.wire.times import duration_from_proto


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round; the fields are those of the report's JSON."""

    session: str
    round: int
    history_tokens: int
    increment_tokens: int
    output_tokens: int
    route: str
    reason: str
    prefill_worker: str | None
    """None for a local round."""
    decode_worker: str
    computed_tokens: int
    """Prompt tokens computed, by the prefill worker and the home together."""
    history_pulled_tokens: int
    history_pulled_bytes: int
    increment_pulled_tokens: int
    increment_pulled_bytes: int
    ttft_s: float
    itl_mean_s: float
    attained: bool


def round_row(session: str, index: int, placed: RoundPlaced, finished: RoundFinished) -> RoundRow:
    """The row of a round from the events of its stream."""
    usage, timings = finished.usage, finished.timings
    return RoundRow(
        session=session,
        round=index,
        history_tokens=usage.history_tokens,
        increment_tokens=usage.increment_tokens,
        output_tokens=usage.output_tokens,
        route=route_name(placed.route),
        reason=reason_name(placed.reason),
        prefill_worker=placed.prefill_worker or None,
        decode_worker=placed.decode_worker,
        computed_tokens=usage.prefill_computed_tokens + usage.decode_computed_tokens,
        history_pulled_tokens=usage.history_pulled_tokens,
        history_pulled_bytes=usage.history_pulled_bytes,
        increment_pulled_tokens=usage.increment_pulled_tokens,
        increment_pulled_bytes=usage.increment_pulled_bytes,
        ttft_s=duration_from_proto(timings.ttft),
        itl_mean_s=duration_from_proto(timings.itl_mean),
        attained=finished.attained,
    )


def attained_shares(slo: Slo, sessions: Iterable[Sequence[RoundRow]]) -> Attainment:
    """The three kinds of attainment (spec 1)."""
    return attainment(
        (slo, [RoundTimings(ttft_s=row.ttft_s, itl_mean_s=row.itl_mean_s) for row in rows])
        for rows in sessions
    )


def report_view(rows: Iterable[RoundRow], shares: Attainment) -> View:
    """The JSON report."""
    return {
        "rounds": [asdict(row) for row in rows],
        "attainment": {
            "round": shares.round,
            "session_mean": shares.session_mean,
            "session_strict": shares.session_strict,
        },
    }


def table_view(row: RoundRow) -> View:
    """A row as the table shows it."""
    return {
        **asdict(row),
        "prefilled_by": f"{row.route} {row.prefill_worker or row.decode_worker}",
        "why": row.reason.replace("_", " "),
        "history_pull": _pull(row.history_pulled_tokens, row.history_pulled_bytes),
        "increment_pull": _pull(row.increment_pulled_tokens, row.increment_pulled_bytes),
        "slo": "met" if row.attained else "missed",
    }


def attainment_views(shares: Attainment) -> list[View]:
    """The attainment as the table shows it, a line per kind."""
    return [
        {"unit": "round", "share": shares.round, "of": shares.rounds},
        {"unit": "session, by its means", "share": shares.session_mean, "of": shares.sessions},
        {"unit": "session, every round", "share": shares.session_strict, "of": shares.sessions},
    ]


ATTAINMENT_COLUMNS: Final = (
    Column("unit", "SLO ATTAINMENT"),
    Column("share", "MET", percent, right=True),
    Column("of", "OF", right=True),
)
TABLE_COLUMNS: Final = (
    Column("session", "SESSION"),
    Column("round", "ROUND", right=True),
    Column("history_tokens", "HIST", right=True),
    Column("increment_tokens", "INCR", right=True),
    Column("prefilled_by", "PREFILLED"),
    Column("why", "WHY"),
    Column("computed_tokens", "COMPUTED", right=True),
    Column("history_pull", "P PULLED", right=True),
    Column("increment_pull", "D PULLED", right=True),
    Column("ttft_s", "TTFT", seconds, right=True),
    Column("itl_mean_s", "ITL", seconds, right=True),
    Column("slo", "SLO"),
)


def _pull(tokens: int, size_bytes: int) -> str:
    return f"{plain(tokens)} / {megabytes(size_bytes)}" if size_bytes else "-"
