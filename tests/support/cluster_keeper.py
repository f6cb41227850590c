"""A cluster for tests that break it: whoever comes next gets what is left, or a new one."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from ampd.cli.cluster import ClusterSpec, LocalCluster
from ampd.core.model import Role


class ClusterKeeper:
    """Starts a cluster as seldom as possible: that takes longer than all that is done to it."""

    def __init__(self, spec: ClusterSpec, run_dir: Path) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._started = 0
        self._cluster: LocalCluster | None = None
        self._stack = AsyncExitStack()

    async def having(
        self, *, coordinators: int = 0, prefill: int = 0, decode: int = 0
    ) -> LocalCluster:
        """A cluster in which at least so many of each still run."""
        wanted = {Role.COORDINATOR: coordinators, Role.PREFILL: prefill, Role.DECODE: decode}
        if self._cluster is None or any(
            sum(s.role is role and s.is_running for s in self._cluster.services) < count
            for role, count in wanted.items()
        ):
            await self.close()
            self._started += 1
            cluster = LocalCluster(self._spec, self._run_dir / str(self._started), progress=print)
            self._cluster = await self._stack.enter_async_context(cluster)
        return self._cluster

    async def close(self) -> None:
        self._cluster = None
        await self._stack.aclose()
