"""T_kv of GPUs: what moving KV over their links takes, estimated from data sheets.

Every GPU of a worker moves its part of the KV over its own link: NVLink within a host, its own
network card (NIC) between two. What is left of the data sheet's rate, and the start-up, are read
off Mooncake's published transfers on vLLM (one prefill and one decode worker, 8 RoCE cards of
25 GB/s, 20 MB to 4.5 GB): 0.37 ms and 137 GB/s, so 0.69 of the rate. The lines are those between
workers of one TP degree; with another one the smaller degree sets the rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ampd.core.cost_model import KvCost

NIC_BYTES_PER_S: Final[Mapping[str, float]] = {
    "a100_sxm": 25e9,
    "h100_sxm": 50e9,
    "h200_sxm": 50e9,
    "h20": 25e9,
    "h20_3e": 25e9,
}
"""One network card, one way, by the device's name: what hosts of 8 of these GPUs commonly have,
one card a GPU."""
NVLINK_BYTES_PER_S: Final[Mapping[str, float]] = {
    "a100_sxm": 300e9,
    "h100_sxm": 450e9,
    "h200_sxm": 450e9,
    "h20": 450e9,
    "h20_3e": 450e9,
}
"""NVLink of one GPU, one way."""
START_S: Final = 0.37e-3
RATE_SHARE: Final = 137 / 200
"""Mooncake's bytes per second over those of its 8 cards."""


def kv_lines(gpu: str, tp: int, kv_bytes_per_token: int) -> tuple[KvCost, KvCost]:
    """The lines between two hosts and within one, for workers of `tp` GPUs each."""
    nic_s, nvlink_s = (
        kv_bytes_per_token / (tp * RATE_SHARE * rates[gpu])
        for rates in (NIC_BYTES_PER_S, NVLINK_BYTES_PER_S)
    )
    return KvCost(START_S, nic_s), KvCost(START_S, nvlink_s)
