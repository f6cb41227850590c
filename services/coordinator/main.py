"""ampd-coordinator: the composition root."""

from __future__ import annotations

import random
import socket
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

from ampd.adapters.homes_grpc import GrpcHomes
from ampd.adapters.tools.parsers import load_parser
from ampd.core.errors import AmpdError
from ampd.core.model import PolicySpec, Role, WorkerInfo, WorkerLoad
from ampd.core.tool_calls import ToolCallParser
from ampd.ports import Tokenizer
from ampd.runtime.heartbeat import Heartbeat
from ampd.runtime.lifecycle import Shutdown, background_tasks, run
from ampd.runtime.logging import configure_logging
from ampd.runtime.process import first_policy, new_incarnation, until_idle
from ampd.runtime.server import PUBLIC_LIMITS, GrpcServer
from ampd.runtime.settings import EXIT_USAGE, load
from ampd.v1 import admin_service_pb2 as admin_pb2
from ampd.v1 import session_service_pb2 as session_pb2
from ampd.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from ampd.v1.session_service_pb2_grpc import add_SessionServiceServicer_to_server
from services.coordinator.coordinator import Coordinator, Identity
from services.coordinator.operations import Operations
from services.coordinator.servicer import AdminServicer, SessionServicer
from services.coordinator.sessions import Admin, Sessions
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.shared_state import SharedState
from services.coordinator.tool_loop import ToolLoop

PROGRAM = "ampd-coordinator"


async def serve(
    settings: CoordinatorSettings, policy: PolicySpec, parser: ToolCallParser, shutdown: Shutdown
) -> None:
    """Serve until shutdown is asked for, then drain."""
    incarnation = new_incarnation()
    async with AsyncExitStack() as stack:
        store = settings.open_store()
        stack.push_async_callback(store.close)
        in_force = await first_policy(store, policy, shutdown)
        if in_force is None:
            return
        homes = GrpcHomes(clock=time.monotonic)
        stack.push_async_callback(homes.close)
        tokenizer = _tokenizer(settings)
        state = SharedState(
            store=store,
            clock=time.monotonic,
            wall_clock=time.time,
            max_state_age_s=settings.max_state_age_s,
            lease_s=settings.lease_s,
        )
        coordinator = Coordinator(
            identity=Identity(settings.worker_id, incarnation),
            store=store,
            state=state,
            homes=homes,
            tokenizer=tokenizer,
            limits=settings.limits(),
            default_policy=in_force,
            clock=time.monotonic,
            wall_clock=time.time,
            tie_seed=lambda: random.getrandbits(32),
        )
        rounds = ToolLoop(
            coordinator=coordinator,
            state=state,
            store=store,
            homes=homes,
            parser=parser,
            tool_timeout_s=settings.tool_timeout_s,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        sessions = Sessions(
            store=store,
            state=state,
            homes=homes,
            model=settings.model_name or Path(settings.model).name,
            default_slo=settings.slo(),
            wall_clock=time.time,
            max_sessions=settings.max_sessions,
        )
        server = GrpcServer(
            address=settings.listen,
            services=[
                session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
                admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
            ],
            limits=PUBLIC_LIMITS,
            incarnation=incarnation,
        )
        add_SessionServiceServicer_to_server(
            SessionServicer(rounds=rounds, sessions=sessions, tokenizer=tokenizer),
            server.grpc,
        )
        add_AdminServiceServicer_to_server(
            AdminServicer(
                Admin(store=store, default_policy=in_force), Operations(store=store, homes=homes)
            ),
            server.grpc,
        )
        await stack.enter_async_context(server)
        heartbeat = Heartbeat(
            store,
            WorkerInfo(
                worker_id=settings.worker_id,
                role=Role.COORDINATOR,
                incarnation=incarnation,
                address=settings.address,
                host=socket.gethostname(),
            ),
            load=lambda: WorkerLoad(
                draining=coordinator.draining, running_rounds=coordinator.running_rounds
            ),
            on_policy=lambda _policy: None,
            on_store=state.heard,
            clock=time.monotonic,
            interval_s=settings.heartbeat_s,
            lease_s=settings.lease_s,
        )
        async with background_tasks() as background:
            background.start("heartbeat", heartbeat.run())
            background.start("write-back", state.run())
            await shutdown.wait()
            coordinator.draining = True
            await server.drain()
            await until_idle(lambda: coordinator.running_rounds > 0 or state.pending_writes > 0)


def _tokenizer(settings: CoordinatorSettings) -> Tokenizer:
    # Only what is used is imported: transformers alone takes a second.
    if settings.tokenizer == "emulated":
        from ampd.adapters.tokenizer_emulated import EmulatedTokenizer

        return EmulatedTokenizer()
    from ampd.adapters.tokenizer_hf import HfTokenizer

    return HfTokenizer(Path(settings.model))


def main() -> None:
    """Console script."""
    settings = load(CoordinatorSettings, sys.argv[1:], program=PROGRAM)
    configure_logging(style=settings.log_style, level=settings.log_level, service=PROGRAM)
    try:
        policy = settings.default_policy()
        parser = load_parser(settings.tool_call_parser)
        exit_code = run(
            lambda shutdown: serve(settings, policy, parser, shutdown), grace_s=settings.drain_s
        )
    except AmpdError as error:
        sys.stderr.write(f"{PROGRAM}: {error.message}\n")
        exit_code = EXIT_USAGE
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
