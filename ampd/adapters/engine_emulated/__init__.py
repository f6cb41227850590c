"""The emulated engine: the `Engine` port without a model, with real KV bytes.

It pages KV in host memory, moves it through a `KvTransport`, takes its time from a cost model,
and computes each next token from the stored bytes of every KV block that the sequence holds.
So KV that is missing, stale, foreign or overwritten changes what is said, and `oracle` knows
what should have been.

    engine.py    the port: checks, admission to memory, pins, handles
    steps.py     who computes in a step, how long it takes, what comes of it
    pulls.py     reading the KV of peers, and the proof that it was the right one
    blocks.py    blocks, who holds them, the prefix cache;  pins.py: pins and loans
    digest.py    KV of tokens, the digest of KV
    sampling.py  the next token of a digest;  output.py: text, and when it ends
    oracle.py    the same stream from tokens alone
    handles.py   KvHandle <-> payload;  requests.py, settings.py
"""

from ampd.adapters.engine_emulated.engine import EmulatedEngine
from ampd.adapters.engine_emulated.oracle import Expected, expect, oracle
from ampd.adapters.engine_emulated.settings import EmulatedSettings

__all__ = ["EmulatedEngine", "EmulatedSettings", "Expected", "expect", "oracle"]
