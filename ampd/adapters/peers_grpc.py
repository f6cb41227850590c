"""Peers over gRPC: homes and prefill workers as they see each other."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.adapters.grpc_channels import ChannelCache, peer_errors
from ampd.core.model import PrefillTarget, PrefillTask
from ampd.ports import ClaimedTask, Clock, PrefillReport
from ampd.wire import worker_protocol
from ampd.worker.v1 import decode_service_pb2, prefill_service_pb2


@dataclass(frozen=True, slots=True)
class PeerTimeouts:
    """How long a peer may take for each call before it counts as unavailable, in seconds."""

    offer_s: float = 1.0
    withdraw_s: float = 2.0
    claim_s: float = 20.0
    """The home's engine lends the history between two steps, and a step may take seconds (CPU).
    A home that is gone is noticed by the connection, long before."""
    complete_s: float = 5.0


@dataclass(frozen=True, slots=True)
class SelfAddress:
    """How a home tells prefill workers where it is."""

    address: str
    """host:port of its DecodeService, as peers reach it."""
    incarnation: int


class GrpcPeers:
    """`ampd.ports.Peers` over gRPC. It owns its connections: close it."""

    def __init__(
        self,
        *,
        home: SelfAddress,
        clock: Clock,
        timeouts: PeerTimeouts | None = None,
        channels: ChannelCache | None = None,
    ) -> None:
        self._home = home
        self._clock = clock
        self._timeouts = timeouts or PeerTimeouts()
        self._channels = channels or ChannelCache()

    def prefill(self, target: PrefillTarget) -> GrpcPrefillPeer:
        """That life of a prefill worker."""
        return GrpcPrefillPeer(target, self._home, self._channels, self._timeouts, self._clock)

    def decode(self, address: str, incarnation: int) -> GrpcDecodePeer:
        """That life of a home."""
        return GrpcDecodePeer(address, incarnation, self._channels, self._timeouts)

    async def close(self) -> None:
        """Close the connections; calls in flight fail. Idempotent."""
        await self._channels.close()


class GrpcPrefillPeer:
    """`ampd.ports.PrefillPeer` over PrefillService."""

    def __init__(
        self,
        target: PrefillTarget,
        home: SelfAddress,
        channels: ChannelCache,
        timeouts: PeerTimeouts,
        clock: Clock,
    ) -> None:
        self._target = target
        self._home = home
        self._channels = channels
        self._timeouts = timeouts
        self._clock = clock

    async def offer(self, task: PrefillTask) -> None:
        """Queue the task there; errors as the port says."""
        request = prefill_service_pb2.OfferRequest(
            incarnation=self._target.incarnation,
            task=worker_protocol.task_to_proto(
                task,
                home_address=self._home.address,
                home_incarnation=self._home.incarnation,
                now_s=self._clock(),
            ),
        )
        async with self._channels.use(self._target.address, self._target.incarnation) as connection:
            with peer_errors():
                await connection.prefill.Offer(request, timeout=self._timeouts.offer_s)

    async def withdraw(self, task_id: str) -> None:
        """The task is void there; errors as of any call to a peer."""
        request = prefill_service_pb2.WithdrawRequest(
            incarnation=self._target.incarnation, task_id=task_id
        )
        async with self._channels.use(self._target.address, self._target.incarnation) as connection:
            with peer_errors():
                await connection.prefill.Withdraw(request, timeout=self._timeouts.withdraw_s)

    async def lost(self) -> None:
        """Returns when that life of the worker is gone."""
        async with self._channels.use(self._target.address, self._target.incarnation) as connection:
            await connection.lost(self._target.incarnation)


class GrpcDecodePeer:
    """`ampd.ports.DecodePeer` over DecodeService."""

    def __init__(
        self, address: str, incarnation: int, channels: ChannelCache, timeouts: PeerTimeouts
    ) -> None:
        self._address = address
        self._incarnation = incarnation
        self._channels = channels
        self._timeouts = timeouts

    async def claim(
        self, task_id: str, worker_id: str, claimer: PrefillTarget | None = None
    ) -> ClaimedTask:
        """Take the task: its tokens and history; errors as the port says."""
        request = decode_service_pb2.ClaimRequest(
            incarnation=self._incarnation,
            task_id=task_id,
            worker_id=worker_id,
            claimer=None if claimer is None else worker_protocol.target_to_proto(claimer),
        )
        async with self._channels.use(self._address, self._incarnation) as connection:
            with peer_errors():
                response = await connection.decode.Claim(request, timeout=self._timeouts.claim_s)
        return worker_protocol.claimed_from_proto(response)

    async def complete(self, task_id: str, worker_id: str, report: PrefillReport) -> None:
        """Hand the result over; errors as the port says."""
        await self._complete(
            decode_service_pb2.CompleteRequest(
                incarnation=self._incarnation,
                task_id=task_id,
                worker_id=worker_id,
                result=worker_protocol.report_to_proto(report),
            )
        )

    async def fail(self, task_id: str, worker_id: str, error_message: str) -> None:
        """Say that the task could not be computed."""
        await self._complete(
            decode_service_pb2.CompleteRequest(
                incarnation=self._incarnation,
                task_id=task_id,
                worker_id=worker_id,
                failure=error_message[: worker_protocol.MAX_FAILURE_CHARS],
            )
        )

    async def lost(self) -> None:
        """Returns when that life of the home is gone."""
        async with self._channels.use(self._address, self._incarnation) as connection:
            await connection.lost(self._incarnation)

    async def _complete(self, request: decode_service_pb2.CompleteRequest) -> None:
        async with self._channels.use(self._address, self._incarnation) as connection:
            with peer_errors():
                await connection.decode.Complete(request, timeout=self._timeouts.complete_s)
