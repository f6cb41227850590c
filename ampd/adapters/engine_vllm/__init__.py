"""The vLLM adapter of the `Engine` port, with KV moved by NIXL through vLLM's connector.

One thread owns vLLM's `LLMEngine` (engine core in this process) and calls `step()`; the
asyncio front (`engine.VllmEngine`) talks to it through one bounded command queue:

    engine.py      the port: checks, events, cancellation          asyncio
    thread.py      commands, steps, leases, statistics             engine thread
    outputs.py     jobs; vLLM's outputs as events and handles
    resuming.py    a round that goes on behind output from elsewhere: its text, its end
    penalties.py   ... and its penalties                            called by vLLM in step()
    scheduler.py   who computes in a step: entrants, one prefill   called by vLLM in step()
    step_plan.py   ... as a pure function
    pulls.py       what KV is pulled, confirmed, lent and pinned
    connector.py   vLLM's NIXL connector, mended                   called by vLLM in step()
    pins.py        pinned KV blocks and their loans
    side_channel.py  NIXL handshakes, and "is this loan still alive?" between engines
    progress.py    what is measured of a request
    handles.py     KvHandle <-> payload;  sampling.py, settings.py

Correctness of a read does not rest on clocks or leases: a reader asks the owner after the
read whether the loan was alive until then, and only then lets the KV into its cache. A loan
id is never used twice, so "alive now" means that no block was reused before.

`vllm`, `torch` and `nixl` are imported nowhere else, and only once `start` runs.
"""

from ampd.adapters.engine_vllm.engine import VllmEngine, start
from ampd.adapters.engine_vllm.settings import Device, VllmSettings

__all__ = ["Device", "VllmEngine", "VllmSettings", "start"]
