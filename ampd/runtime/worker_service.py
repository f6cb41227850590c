"""WorkerService: what prefill and decode workers serve alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from ampd.ports import WorkerHandler
from ampd.wire import moving, worker_protocol
from ampd.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME: Final = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """Checks whom calls are meant for."""

    def __init__(self, handler: WorkerHandler, *, incarnation: int) -> None:
        self._handler = handler
        self._incarnation = incarnation

    async def Drain(  # noqa: N802
        self, request: worker_service_pb2.DrainRequest, context: Context
    ) -> worker_service_pb2.DrainResponse:
        """Let the worker finish and end."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        return moving.drain_to_proto(await self._handler.drain())
