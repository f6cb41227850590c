"""ampd-decode: the composition root."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace

from ampd.adapters.homes_grpc import GrpcHomes
from ampd.adapters.peers_grpc import GrpcPeers, SelfAddress
from ampd.adapters.tools.entry_points import EntryPointTools
from ampd.adapters.tools.remote import RemoteTools
from ampd.adapters.tools.toolbox import ToolBox
from ampd.core.errors import AmpdError
from ampd.core.model import Binding, Role
from ampd.core.policies import DEFAULT_POLICY, resolve
from ampd.runtime import worker_service
from ampd.runtime.drain import WorkerDrain
from ampd.runtime.engines import start_engine
from ampd.runtime.heartbeat import Heartbeat
from ampd.runtime.lifecycle import Shutdown, background_tasks, run
from ampd.runtime.logging import configure_logging
from ampd.runtime.process import first_policy, new_incarnation, until_idle
from ampd.runtime.server import INTERNAL_LIMITS, GrpcServer
from ampd.runtime.settings import EXIT_USAGE, load
from ampd.runtime.worker import cost_model, worker_info
from ampd.runtime.worker_service import WorkerServicer
from ampd.worker.v1 import decode_service_pb2 as decode_pb2
from ampd.worker.v1.decode_service_pb2_grpc import add_DecodeServiceServicer_to_server
from ampd.worker.v1.worker_service_pb2_grpc import add_WorkerServiceServicer_to_server
from services.decode.draining import HomeDrain
from services.decode.home import Home
from services.decode.late_tasks import LateTasks
from services.decode.moving import SessionMover
from services.decode.reconciling import Reconciler
from services.decode.servicer import DecodeServicer
from services.decode.settings import DecodeSettings
from services.decode.tasks import PrefillTasks

PROGRAM = "ampd-decode"
SWEEP_EVERY_S = 5.0


async def serve(settings: DecodeSettings, local_tools: EntryPointTools, shutdown: Shutdown) -> None:
    """Serve until shutdown is asked for, then drain."""
    incarnation = new_incarnation()
    async with AsyncExitStack() as stack:
        store = settings.open_store()
        stack.push_async_callback(store.close)
        # The home sweeps its sessions itself: a pin of the engine outlives them all.
        engine = await start_engine(settings, Role.DECODE, incarnation, 2 * settings.session_ttl_s)
        stack.push_async_callback(engine.close)
        cost = await cost_model(engine, settings)
        engine.use_cost_model(cost)
        server = GrpcServer(
            address=settings.listen,
            services=[
                decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name,
                worker_service.SERVICE_NAME,
            ],
            limits=INTERNAL_LIMITS,
            incarnation=incarnation,
        )
        peers = GrpcPeers(home=SelfAddress(settings.address, incarnation), clock=time.monotonic)
        stack.push_async_callback(peers.close)
        homes = GrpcHomes(clock=time.monotonic)
        stack.push_async_callback(homes.close)
        remotes = [
            RemoteTools(address, settings.tool_limits()) for address in settings.tool_services
        ]
        policy = await first_policy(store, resolve(DEFAULT_POLICY), shutdown)
        if policy is None:
            return
        info = worker_info(settings, Role.DECODE, incarnation, engine.info, cost)
        async with asyncio.TaskGroup() as chores, background_tasks() as background:
            late = LateTasks(
                worker_id=settings.worker_id,
                store=store,
                cost=cost,
                chores=chores,
                clock=time.monotonic,
            )
            tasks = PrefillTasks(
                worker_id=settings.worker_id,
                engine=engine,
                peers=peers,
                late=late,
                limits=settings.limits(),
                chores=chores,
            )
            home = Home(
                worker_id=settings.worker_id,
                engine=engine,
                tasks=tasks,
                cost=cost,
                limits=settings.limits(),
                chores=chores,
                clock=time.monotonic,
            )
            home.apply_policy(policy)
            tools = ToolBox(
                [local_tools, *remotes],
                max_running=settings.max_running_tools,
                draining=lambda: home.draining,
            )
            stack.push_async_callback(tools.close)
            mover = SessionMover(
                info=info,
                home=home,
                engine=engine,
                store=store,
                homes=homes,
                chores=chores,
                clock=time.monotonic,
            )
            reconciler = Reconciler(
                me=Binding(settings.worker_id, incarnation),
                home=home,
                store=store,
                clock=time.monotonic,
                wall_clock=time.time,
            )
            emptying = HomeDrain(home=home, mover=mover, cost=cost, clock=time.monotonic)
            drain = WorkerDrain(
                shutdown=shutdown,
                start=emptying.start,
                status=emptying.status,
                load=lambda: replace(home.load(), tools=tools.names()),
                clock=time.monotonic,
            )
            add_DecodeServiceServicer_to_server(
                DecodeServicer(home, mover, tools, incarnation=incarnation, clock=time.monotonic),
                server.grpc,
            )
            add_WorkerServiceServicer_to_server(
                WorkerServicer(drain, incarnation=incarnation), server.grpc
            )
            async with server:
                heartbeat = Heartbeat(
                    store,
                    info,
                    load=drain.load,
                    on_policy=home.apply_policy,
                    on_store=home.heard,
                    clock=time.monotonic,
                    interval_s=settings.heartbeat_s,
                    lease_s=settings.lease_s,
                )
                late.publish = heartbeat.beat_now
                background.start("heartbeat", heartbeat.run())
                background.start("sweep", _sweep(home))
                background.start("reconcile", reconciler.run())
                for remote in remotes:
                    background.start("tools", remote.keep_listing())
                await shutdown.wait()
                drain.begin()
                heartbeat.beat_now()
                await server.drain()
                await emptying.run()
                await until_idle(lambda: tools.running > 0)
                tasks.closing = True


async def _sweep(home: Home) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        await home.sweep()


def main() -> None:
    """Console script."""
    settings = load(DecodeSettings, sys.argv[1:], program=PROGRAM)
    configure_logging(style=settings.log_style, level=settings.log_level, service=PROGRAM)
    try:
        local_tools = EntryPointTools(settings.tools, settings.tool_limits())
    except AmpdError as error:
        sys.stderr.write(f"{PROGRAM}: {error.message}\n")
        sys.exit(EXIT_USAGE)
    sys.exit(run(lambda shutdown: serve(settings, local_tools, shutdown), grace_s=settings.drain_s))


if __name__ == "__main__":
    main()
