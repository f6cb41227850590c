"""The one place where a call's errors become statuses, and where calls are logged."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
import structlog

from ampd.core.errors import AmpdError, ErrorReason
from ampd.wire import errors

log = structlog.get_logger(__name__)

OWN_PREFIX: Final = "/ampd."
"""Methods of AMPD's own services: health, reflection and channelz pass as they are."""
PUBLIC_PREFIX: Final = "/ampd.v1."
"""Calls of clients: logged one by one. Those between workers are logged for debugging."""

Context = Any
"""grpc.aio.ServicerContext, whose stubs want request types that nobody knows here."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Answers AmpdError with its rich status and anything unexpected with INTERNAL, naming an
    incident that the log explains; logs method, code and seconds, never what was said.

    A streaming handler's generator is closed by the call's own task, and at once: what a
    cancelled round took must be free again within a second.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one call. AMPD has unary and server-streaming methods only."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OWN_PREFIX):
            return handler
        make: Any = grpc.unary_unary_rpc_method_handler
        call: Callable[[Any, Context], Awaitable[object]]
        if handler.response_streaming:
            make, call = grpc.unary_stream_rpc_method_handler, _streaming(method, handler)
        else:
            call = _unary(method, handler)
        wrapped: Handler = make(
            call,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped


def _unary(method: str, handler: Handler) -> Callable[[Any, Context], Awaitable[object]]:
    inner: Any = handler.unary_unary

    async def call(request: Any, context: Context) -> object:
        started_s = time.monotonic()
        try:
            response = await inner(request, context)
        except BaseException as error:  # noqa: BLE001 - answered or raised again
            await _answer(error, context, method, started_s)
        _log_call(method, "OK", started_s)
        return response

    return call


def _streaming(method: str, handler: Handler) -> Callable[[Any, Context], Awaitable[None]]:
    inner: Any = handler.unary_stream

    async def call(request: Any, context: Context) -> None:
        started_s = time.monotonic()
        try:
            # Written here, not yielded to gRPC: it would leave a cancelled generator to the
            # garbage collector.
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    await _write(context, response)
        except BaseException as error:  # noqa: BLE001 - answered or raised again
            await _answer(error, context, method, started_s)
        _log_call(method, "OK", started_s)

    return call


class _ClientGone(Exception):  # noqa: N818
    """A write failed: the client has cancelled the call, or its connection is gone."""


async def _write(context: Context, response: object) -> None:
    try:
        await context.write(response)
    except grpc.aio.InternalError as error:
        raise _ClientGone from error


async def _answer(
    error: BaseException, context: Context, method: str, started_s: float
) -> NoReturn:
    """End the call with the error's status."""
    if isinstance(error, AmpdError):
        _log_call(method, errors.status_code(error).name, started_s, reason=error.reason.value)
        await _abort(context, error)
    if not isinstance(error, Exception) or isinstance(error, _ClientGone):
        _log_call(method, "CANCELLED", started_s)
        # When the client went away this fails, and nobody is there to miss it. When the handler
        # was cancelled here, the client would otherwise wait until its deadline.
        with suppress(Exception):
            await _abort(context, AmpdError(ErrorReason.WORKER_UNAVAILABLE, "ended by the server"))
        raise asyncio.CancelledError if isinstance(error, _ClientGone) else error
    incident = secrets.token_hex(8)
    log.error(
        "call_failed",
        method=method,
        incident=incident,
        seconds=round(time.monotonic() - started_s, 6),
        exc_info=error,
    )
    await _abort(
        context,
        AmpdError(
            ErrorReason.INTERNAL,
            f"internal error; the server's log explains incident {incident}",
            metadata={"incident": incident},
        ),
    )


async def _abort(context: Context, error: AmpdError) -> NoReturn:
    status = errors.to_status(error)
    await context.abort(
        errors.status_code(error),
        status.message,
        ((errors.DETAILS_KEY, status.SerializeToString()),),
    )
    raise AssertionError("abort returned")


def _log_call(method: str, code: str, started_s: float, **fields: str) -> None:
    tell = log.info if method.startswith(PUBLIC_PREFIX) else log.debug
    tell("call", method=method, code=code, seconds=round(time.monotonic() - started_s, 6), **fields)
