"""What every StateStore adapter keeps, how much of it and for how long."""

from __future__ import annotations

from typing import Final

DEFAULT_IDLE_TTL_S: Final = 24 * 3600.0
"""A session that nobody writes for this long (s) is gone (setting `idle_ttl_s`)."""

CLOSED_TTL_S: Final = 600.0
"""A closed session's record stays this long (s), so that a repeated close finds it."""

REPLAY_TTL_S: Final = 600.0
"""A finished round answers its repeated request_id this long (s)."""

CREATE_REQUEST_TTL_S: Final = 600.0
"""A repeated request_id of CreateSession gives the first session back this long (s)."""

MAX_ROUNDS_KEPT: Final = 256
"""Round records kept per session, the newest."""

MAX_PAGE_SIZE: Final = 1000
"""Sessions in one page at most."""

EXPIRED_CHECKS_PER_CREATE: Final = 2
"""Random entries of the tenant's index that each new session checks for expiry: two per
entry added keep the expired ones below half of the index even if nobody lists it."""
