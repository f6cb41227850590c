"""Enums both ways: a core StrEnum and the proto enum with the same names behind a prefix."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ampd.core import errors
from ampd.core.errors import invalid_field
from ampd.core.lifecycle import SessionState
from ampd.core.model import FinishReason, ItlStatistic, Role, Route, RouteReason
from ampd.v1 import error_reason_pb2, round_pb2, session_pb2, worker_pb2

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

E = TypeVar("E", bound=StrEnum)
V = TypeVar("V", bound=int)


class EnumCodec(Generic[E, V]):
    """One enum's values both ways. `ROUTE` + `Route.LOCAL` is `ROUTE_LOCAL`.

    Making one fails with ValueError when the proto lacks a member, so a name that is out of
    step is found at import, not in a round.
    """

    def __init__(self, core: type[E], proto: _EnumTypeWrapper[V], prefix: str) -> None:
        self._to_proto: dict[E, V] = {
            member: proto.Value(f"{prefix}_{member.name}") for member in core
        }
        self._from_proto: dict[int, E] = {value: member for member, value in self._to_proto.items()}

    def to_proto(self, member: E) -> V:
        """The proto's value of a member."""
        return self._to_proto[member]

    def from_proto(self, value: int, path: str) -> E:
        """The member of a proto value; unspecified or unknown: AmpdError INVALID_FIELD `path`."""
        member = self._from_proto.get(value)
        if member is None:
            raise invalid_field(path, f"{value} is not one of {self._names()}")
        return member

    def from_proto_or_none(self, value: int, path: str) -> E | None:
        """The same with unspecified (0) as None."""
        return None if value == 0 else self.from_proto(value, path)

    def _names(self) -> str:
        return ", ".join(f"{value} ({member.name})" for value, member in self._from_proto.items())


ERROR_REASON: Final = EnumCodec(errors.ErrorReason, error_reason_pb2.ErrorReason, "ERROR_REASON")
FINISH_REASON: Final = EnumCodec(FinishReason, round_pb2.FinishReason, "FINISH_REASON")
ITL_STATISTIC: Final = EnumCodec(ItlStatistic, session_pb2.ItlStatistic, "ITL_STATISTIC")
ROLE: Final = EnumCodec(Role, worker_pb2.WorkerRole, "WORKER_ROLE")
ROUTE: Final = EnumCodec(Route, round_pb2.Route, "ROUTE")
ROUTE_REASON: Final = EnumCodec(RouteReason, round_pb2.RouteReason, "ROUTE_REASON")
SESSION_STATE: Final = EnumCodec(SessionState, session_pb2.SessionState, "SESSION_STATE")
