"""KV transfers between workers, with contention.

Each worker sends one transfer and receives one at a time (its link is full duplex): a transfer
begins when both ends are free, first come first served, and takes what the sender's cost model
says. The start-up time of a transfer keeps neither end busy.
"""

from __future__ import annotations

from ampd.core.cost_model import CostModel


class LinkEnd:
    """One worker's link: until when it sends and receives (s)."""

    __slots__ = ("receives_until_s", "sends_until_s")

    def __init__(self) -> None:
        self.sends_until_s = 0.0
        self.receives_until_s = 0.0


def transfer_end_s(
    now_s: float,
    tokens: int,
    *,
    source: LinkEnd,
    target: LinkEnd,
    cost: CostModel,
    contention: bool,
) -> float:
    """When KV of so many tokens, asked for now, has arrived; nothing to move is there now."""
    seconds = cost.t_kv(tokens)
    if not (contention and tokens):
        return now_s + seconds
    begin_s = max(now_s, source.sends_until_s, target.receives_until_s)
    busy_s = seconds - cost.kv.base_s
    source.sends_until_s = target.receives_until_s = begin_s + busy_s
    return begin_s + seconds
