"""ampd-prefill: the composition root."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import Final

from ampd.adapters.peers_grpc import GrpcPeers, SelfAddress
from ampd.core.model import PrefillTarget, Role
from ampd.core.policies import DEFAULT_POLICY, resolve
from ampd.runtime import worker_service
from ampd.runtime.drain import WorkerDrain
from ampd.runtime.engines import start_engine
from ampd.runtime.heartbeat import Heartbeat
from ampd.runtime.lifecycle import Shutdown, background_tasks, run
from ampd.runtime.logging import configure_logging
from ampd.runtime.process import first_policy, new_incarnation, until_idle
from ampd.runtime.server import INTERNAL_LIMITS, GrpcServer
from ampd.runtime.settings import load
from ampd.runtime.worker import cost_model, worker_info
from ampd.runtime.worker_service import WorkerServicer
from ampd.worker.v1 import prefill_service_pb2 as prefill_pb2
from ampd.worker.v1.prefill_service_pb2_grpc import add_PrefillServiceServicer_to_server
from ampd.worker.v1.worker_service_pb2_grpc import add_WorkerServiceServicer_to_server
from services.prefill.servicer import PrefillServicer
from services.prefill.settings import PrefillSettings
from services.prefill.worker import PrefillWorker

PROGRAM = "ampd-prefill"
HANDOVER_S: Final = 6.0
"""What homes get, in a drain, to read the last results: longer than any transfer takes."""


async def serve(settings: PrefillSettings, shutdown: Shutdown) -> None:
    """Serve until shutdown is asked for, then drain."""
    incarnation = new_incarnation()
    async with AsyncExitStack() as stack:
        store = settings.open_store()
        stack.push_async_callback(store.close)
        engine = await start_engine(settings, Role.PREFILL, incarnation)
        stack.push_async_callback(engine.close)
        cost = await cost_model(engine, settings)
        engine.use_cost_model(cost)
        server = GrpcServer(
            address=settings.listen,
            services=[
                prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
                worker_service.SERVICE_NAME,
            ],
            limits=INTERNAL_LIMITS,
            incarnation=incarnation,
        )
        peers = GrpcPeers(home=SelfAddress(settings.address, incarnation), clock=time.monotonic)
        stack.push_async_callback(peers.close)
        policy = await first_policy(store, resolve(DEFAULT_POLICY), shutdown)
        if policy is None:
            return
        worker = PrefillWorker(
            me=PrefillTarget(settings.worker_id, incarnation, settings.address),
            engine=engine,
            peers=peers,
            store=store,
            cost=cost,
            policy=policy,
            max_queued_tasks=settings.max_queued_tasks,
            clock=time.monotonic,
        )
        drain = WorkerDrain(
            shutdown=shutdown,
            start=worker.start_drain,
            status=worker.drain_status,
            load=worker.load,
            clock=time.monotonic,
        )
        async with background_tasks() as background:
            add_PrefillServiceServicer_to_server(
                PrefillServicer(worker, incarnation=incarnation, clock=time.monotonic), server.grpc
            )
            add_WorkerServiceServicer_to_server(
                WorkerServicer(drain, incarnation=incarnation), server.grpc
            )
            async with server:
                heartbeat = Heartbeat(
                    store,
                    worker_info(settings, Role.PREFILL, incarnation, engine.info, cost),
                    load=drain.load,
                    on_policy=worker.apply_policy,
                    clock=time.monotonic,
                    interval_s=settings.heartbeat_s,
                    lease_s=settings.lease_s,
                )
                background.start("heartbeat", heartbeat.run())
                background.start("pump", worker.run())
                await shutdown.wait()
                drain.begin()
                heartbeat.beat_now()
                await server.drain()
                await until_idle(lambda: worker.busy)
                with suppress(TimeoutError):
                    async with asyncio.timeout(HANDOVER_S):
                        await until_idle(lambda: worker.lending)


def main() -> None:
    """Console script."""
    settings = load(PrefillSettings, sys.argv[1:], program=PROGRAM)
    configure_logging(style=settings.log_style, level=settings.log_level, service=PROGRAM)
    sys.exit(run(lambda shutdown: serve(settings, shutdown), grace_s=settings.drain_s))


if __name__ == "__main__":
    main()
