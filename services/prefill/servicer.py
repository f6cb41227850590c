"""PrefillService: from the wire to the prefill worker's handler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from ampd.ports import Clock, PrefillHandler
from ampd.wire import names, worker_protocol
from ampd.worker.v1 import prefill_service_pb2, prefill_service_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Checks requests and whom they are meant for; `clock` is the handler's."""

    def __init__(self, handler: PrefillHandler, *, incarnation: int, clock: Clock) -> None:
        self._handler = handler
        self._incarnation = incarnation
        self._clock = clock

    async def Offer(  # noqa: N802
        self, request: prefill_service_pb2.OfferRequest, context: Context
    ) -> prefill_service_pb2.OfferResponse:
        """Queue a task."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        task, home_address, home_incarnation = worker_protocol.task_from_proto(
            request.task, now_s=self._clock()
        )
        await self._handler.offer(task, home_address, home_incarnation)
        return prefill_service_pb2.OfferResponse()

    async def Withdraw(  # noqa: N802
        self, request: prefill_service_pb2.WithdrawRequest, context: Context
    ) -> prefill_service_pb2.WithdrawResponse:
        """Void a task."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        await self._handler.withdraw(names.required_id(request.task_id, "task_id"))
        return prefill_service_pb2.WithdrawResponse()
