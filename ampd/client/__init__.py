"""The Python client: sessions and their rounds, and a look into the cluster.

    async with AmpdClient("127.0.0.1:7070") as client:
        session = await client.create_session()
        request = GenerateRequest(session_id=session.session_id, text="Once upon a time")
        async for event in client.generate(request):
            if isinstance(event, TokenBatch):
                print(event.text, end="")
        await client.close_session(session.session_id)

Requests and answers are the messages of `ampd.v1`; every failure is an `AmpdError`.

    client.py       the calls
    resuming.py     a lost stream asked for again: what of it is new to the caller
    retries.py      which failures are tried again, when, and for how long
    connections.py  the coordinators, one of which is talked to
"""

from ampd.client.client import (
    CALL_TIMEOUT_S,
    MAX_ATTEMPTS,
    MAX_OUTAGE_S,
    MAX_ROUND_ATTEMPTS,
    MOVE_TIMEOUT_S,
    ROUND_TIMEOUT_S,
    AmpdClient,
)
from ampd.client.resuming import RoundEvent

__all__ = [
    "CALL_TIMEOUT_S",
    "MAX_ATTEMPTS",
    "MAX_OUTAGE_S",
    "MAX_ROUND_ATTEMPTS",
    "MOVE_TIMEOUT_S",
    "ROUND_TIMEOUT_S",
    "AmpdClient",
    "RoundEvent",
]
