"""Settings of the prefill worker; each is a flag, an `AMPD_...` variable and a key of the file."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from ampd.core.prefill_queue import DEFAULT_MAX_TASKS
from ampd.runtime.process import WORKER_ID
from ampd.runtime.worker import WorkerSettings


class PrefillSettings(WorkerSettings):
    """ampd-prefill: prefills for the homes that offer it tasks."""

    worker_id: str = Field("prefill-0", pattern=WORKER_ID)
    """Unique name in the cluster."""
    max_queued_tasks: PositiveInt = DEFAULT_MAX_TASKS
    """Tasks that may wait; one more is refused."""
