"""gRPC without sockets, under virtual time: what `grpc.aio.insecure_channel` and
`grpc.aio.server` give inside a simulation, so that real clients, servicers, interceptors and
messages run over a network whose delays and faults a seed decides.

It behaves as gRPC over TCP does where code can tell: the messages of a call keep their order; a
call ends once; a broken connection fails it at the client with UNAVAILABLE and cancels its
handler; silence breaks a connection when keepalive notices; a cancelled call cancels its handler
a little later; a slow reader stops the writer.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from virtual_loop import PROCESS, SimProcess

CLIENT_KEEPALIVE_S: Final = 6.0
"""As `ampd.adapters.grpc_channels` sets it: 4 s, and 2 s for the answer."""
SERVER_KEEPALIVE_S: Final = 15.0
"""As `ampd.runtime.server` sets it."""
RETRANSMIT_S: Final = 0.2
"""Until a healed link carries again what it held."""
LIGHT: Final = 1e-5
"""Least latency (s)."""

_Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """What may happen to calls: shares of all calls, times in seconds."""

    latency_s: float = 0.0005
    """Mean of a message's way, exponentially distributed."""
    slow_share: float = 0.0
    """Messages that take up to `slow_s` longer."""
    slow_s: float = 1.0
    reset_share: float = 0.0
    """Calls whose connection breaks at some moment: before, while or after they are served."""
    silent_share: float = 0.0
    """Unary calls of which the request or the answer vanishes."""
    duplicate_share: float = 0.0
    """Idempotent unary calls that are served twice, the second time up to 3 s later."""
    grid_s: float = 0.0
    """Messages arrive at multiples of it: those of different calls in one step of the loop."""
    window: int = 256
    """Messages of a stream that may be on their way to its reader."""


CALM: Final = NetworkFaults()
IDEMPOTENT: Final = frozenset({"Offer", "Withdraw", "Release", "CreateSession", "CloseSession"})
"""Methods whose contract says that a repetition changes nothing."""


@dataclass(eq=False)
class _Cut:
    """A pair that cannot reach each other, and what waits on the wire."""

    number: int = 0
    healed: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)


class VirtualNetwork:
    """Servers by address, calls in flight, and what is wrong between two processes."""

    def __init__(self, rng: random.Random, note: Callable[..., None]) -> None:
        self.faults = CALM
        self._rng = rng
        self._note = note
        self._servers: dict[str, VirtualServer] = {}
        self._vanished: set[str] = set()
        self._cuts: dict[frozenset[SimProcess], _Cut] = {}
        self.calls: dict[int, VirtualCall] = {}
        self._made = 0

    # --- what goes wrong -------------------------------------------------------------------

    def cut(self, one: SimProcess, other: SimProcess) -> None:
        """Nothing passes between the two, and no one is told."""
        pair = frozenset((one, other))
        cut = self._cuts.setdefault(pair, _Cut())
        cut.healed, cut.number = False, cut.number + 1
        number = cut.number
        for call in self._between(pair):
            call.break_later(
                CLIENT_KEEPALIVE_S, SERVER_KEEPALIVE_S, lambda: self._is_cut(pair, number)
            )

    def heal(self, one: SimProcess, other: SimProcess) -> None:
        """Messages pass again, in their order; those of connections that have broken meanwhile
        are lost."""
        pair = frozenset((one, other))
        cut = self._cuts.get(pair)
        if cut is None or cut.healed:
            return
        cut.healed = True
        number = cut.number

        def flush() -> None:
            if cut.healed and cut.number == number:
                del self._cuts[pair]
                for deliver in cut.held:
                    deliver()

        asyncio.get_running_loop().call_later(RETRANSMIT_S, flush, context=_of(None))

    def heal_all(self) -> None:
        """Every pair reaches each other again."""
        for pair in list(self._cuts):
            self.heal(*pair)

    def running_handlers(self) -> list[str]:
        """The calls that servers are busy with."""
        return [
            f"{server.process.name}: {task.get_name()}"
            for server in self._servers.values()
            for task in server.running
        ]

    def _is_cut(self, pair: frozenset[SimProcess], number: int | None = None) -> bool:
        cut = self._cuts.get(pair)
        return cut is not None and not cut.healed and number in (None, cut.number)

    def _between(self, pair: frozenset[SimProcess]) -> list[VirtualCall]:
        return [call for call in self.calls.values() if pair == {call.client, call.server}]

    def process_died(self, process: SimProcess, *, silent: bool) -> None:
        """Its connections break: at once when the host says so, else when keepalive notices."""
        for address, server in list(self._servers.items()):
            if server.process is process:
                del self._servers[address]
                if silent:
                    self._vanished.add(address)
        for call in list(self.calls.values()):
            if call.server is process:
                call.break_later(CLIENT_KEEPALIVE_S if silent else self.latency_s(), None)
            elif call.client is process:
                call.break_later(None, SERVER_KEEPALIVE_S if silent else self.latency_s())
                self.calls.pop(call.number)

    def process_paused(self, process: SimProcess) -> None:
        """Its connections break when it does not answer for as long as keepalive waits."""
        for call in list(self.calls.values()):
            if process in (call.client, call.server):
                call.break_later(CLIENT_KEEPALIVE_S, SERVER_KEEPALIVE_S, lambda: process.frozen)

    # --- delivery ----------------------------------------------------------------------------

    def latency_s(self) -> float:
        """Of one message."""
        seconds = LIGHT + self._rng.expovariate(1 / self.faults.latency_s)
        if self._rng.random() < self.faults.slow_share:
            seconds += self._rng.random() * self.faults.slow_s
        return seconds

    def arrival_s(self, last_s: float) -> float:
        """When a message that is sent now arrives: behind the last one of its call."""
        at_s, grid_s = _now() + self.latency_s(), self.faults.grid_s
        if grid_s:
            at_s = math.ceil(at_s / grid_s) * grid_s
        return max(at_s, math.nextafter(last_s, math.inf))

    def carry(
        self, call: VirtualCall, to: SimProcess, at_s: float, arrive: Callable[[], None]
    ) -> None:
        """Let a message arrive, in the context of its receiver, unless the link is cut then."""
        pair = frozenset((call.client, call.server))

        def deliver() -> None:
            if (cut := self._cuts.get(pair)) is not None:
                cut.held.append(deliver)
                return
            asyncio.get_running_loop().call_soon(arrive, context=_of(to))

        asyncio.get_running_loop().call_at(at_s, deliver, context=_of(None))

    # --- the ends ----------------------------------------------------------------------------

    def channel(self, address: str, **_: Any) -> VirtualChannel:
        """Stands for `grpc.aio.insecure_channel`."""
        return VirtualChannel(self, address, _here())

    def make_server(self, interceptors: Sequence[Any] = (), **_: Any) -> VirtualServer:
        """Stands for `grpc.aio.server`."""
        return VirtualServer(self, _here(), tuple(interceptors))

    def listen(self, address: str, server: VirtualServer) -> None:
        """Serve there from now on. RuntimeError as gRPC's when somebody does."""
        if address in self._servers:
            raise RuntimeError(f"{address} is in use")
        self._servers[address] = server
        self._vanished.discard(address)

    def unlisten(self, server: VirtualServer) -> None:
        """Take no new call there."""
        self._servers = {a: s for a, s in self._servers.items() if s is not server}

    def begin(self, call: VirtualCall, address: str) -> None:
        """Send the call's request, or let it fail."""
        rng, faults = self._rng, self.faults
        server = self._servers.get(address)
        self._made += 1
        call.number = self._made
        if server is None:
            wait_s = 0.1 + rng.random() if address in self._vanished else self.latency_s()
            call.fail_later(wait_s, f"nobody answers at {address}")
            return
        call.server, call.host = server.process, server
        if self._is_cut(frozenset((call.client, server.process))):
            call.fail_later(0.1 + rng.random(), f"{address} cannot be reached")
            return
        self.calls[call.number] = call
        dice = rng.random()
        if dice < faults.reset_share:
            moment_s = rng.random() * (2.0 if call.streaming else 0.005)
            call.break_later(moment_s, moment_s)
        elif dice < faults.reset_share + faults.silent_share and not call.streaming:
            call.silent = rng.choice(("request", "answer"))
        if rng.random() < faults.duplicate_share and call.method.rpartition("/")[2] in IDEMPOTENT:
            call.duplicate_later(3.0 * rng.random())
        if self.paused_too_long(server.process):
            call.break_later(CLIENT_KEEPALIVE_S, SERVER_KEEPALIVE_S, lambda: server.process.frozen)
        call.to_server(call.arrived)

    @staticmethod
    def paused_too_long(process: SimProcess) -> bool:
        """Whether a call to it may find nobody for long."""
        return process.frozen

    def note(self, *what: object) -> None:
        """For the log of the run."""
        self._note(*what)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _here() -> SimProcess:
    process = PROCESS.get()
    assert process is not None, "no process here"
    return process


def _of(process: SimProcess | None) -> contextvars.Context:
    context = contextvars.Context()
    context.run(PROCESS.set, process)
    return context


class VirtualCall:
    """One call. The client's side ends by `_finish`, the server's by its handler's end; either
    may end without the other knowing, for a while."""

    def __init__(
        self,
        network: VirtualNetwork,
        address: str,
        method: str,
        request: bytes,
        *,
        streaming: bool,
        deserialize: Callable[[bytes], Any],
        timeout_s: float | None,
        metadata: _Metadata,
    ) -> None:
        self.network = network
        self.method = method
        self.request = request
        self.streaming = streaming
        self.metadata = tuple(metadata)
        self.client = self.server = _here()
        self.host: VirtualServer | None = None
        self.number = 0
        self.silent = ""
        self.deadline_s = None if timeout_s is None else _now() + timeout_s
        self._deserialize = deserialize
        self._to_server_s = self._to_client_s = 0.0
        self._inbox: deque[bytes] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._end: tuple[grpc.StatusCode, str, _Metadata] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._server_timer: asyncio.TimerHandle | None = None
        self._handler: asyncio.Task[None] | None = None
        self._handler_void = False
        self._on_the_way = 0
        self._room: asyncio.Future[None] | None = None
        if self.deadline_s is not None:
            self._timer = asyncio.get_running_loop().call_at(
                self.deadline_s, self._finish, grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"
            )
        network.begin(self, address)

    # --- the client's side -------------------------------------------------------------------

    def cancel(self) -> bool:
        """As gRPC's: the client is done at once, the handler hears of it."""
        if self._end is not None:
            return False
        self._finish(grpc.StatusCode.CANCELLED, "cancelled by the client")
        return True

    def done(self) -> bool:
        return self._end is not None

    async def code(self) -> grpc.StatusCode:
        while self._end is None:
            await self._something()
        return self._end[0]

    def __await__(self) -> Any:
        return self._unary().__await__()

    async def _unary(self) -> Any:
        message = await self.read()
        assert message is not grpc.aio.EOF, f"{self.method} ended without an answer"
        # The status comes after the message: without it the call has not succeeded.
        while self._end is None:
            await self._something()
        self._raise_failure()
        return message

    def __aiter__(self) -> VirtualCall:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`."""
        while not self._inbox and self._end is None:
            await self._something()
        self._raise_failure()
        if not self._inbox:
            return grpc.aio.EOF
        message = self._inbox.popleft()
        if self._end is None:
            self.to_server(self._made_room)
        return self._deserialize(message)

    async def _something(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        except asyncio.CancelledError:
            # Who waits for a call and is cancelled cancels the call, as in gRPC.
            self.cancel()
            raise

    def _raise_failure(self) -> None:
        if self._end is None:
            return
        code, details, trailing = self._end
        if code is grpc.StatusCode.CANCELLED and "by the client" in details:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details
            )

    def _receive(self, message: bytes) -> None:
        if self._end is None:
            self._inbox.append(message)
            self._notify()

    def _finish(self, code: grpc.StatusCode, details: str, trailing: _Metadata = ()) -> None:
        """The client's end of the call, once; a handler that may still run is told."""
        if self._end is not None:
            return
        self._end = (code, details, trailing)
        if self._timer is not None:
            self._timer.cancel()
        self._notify()
        if self.host is not None and code is not grpc.StatusCode.OK:
            self.to_server(self._void)
        self.network.calls.pop(self.number, None)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def fail_later(self, after_s: float, details: str) -> None:
        """UNAVAILABLE at the client."""
        asyncio.get_running_loop().call_later(
            after_s,
            self._finish,
            grpc.StatusCode.UNAVAILABLE,
            details,
            context=_of(self.client),
        )

    def break_later(
        self,
        client_after_s: float | None,
        server_after_s: float | None,
        still: Callable[[], bool] = lambda: True,
    ) -> None:
        """The connection breaks: each side notices after its time (None: never), if it is
        `still` broken then."""
        loop = asyncio.get_running_loop()

        def at_client() -> None:
            if still():
                loop.call_soon(
                    self._finish,
                    grpc.StatusCode.UNAVAILABLE,
                    "connection broken",
                    context=_of(self.client),
                )

        def at_server() -> None:
            if still():
                loop.call_soon(self._void, context=_of(self.server))

        if client_after_s is not None:
            loop.call_later(client_after_s, at_client, context=_of(None))
        if server_after_s is not None:
            loop.call_later(server_after_s, at_server, context=_of(None))

    # --- the wire ------------------------------------------------------------------------------

    def to_server(self, arrive: Callable[[], None]) -> None:
        """One message, behind those before it."""
        self._to_server_s = self.network.arrival_s(self._to_server_s)
        self.network.carry(self, self.server, self._to_server_s, arrive)

    def to_client(self, arrive: Callable[[], None]) -> None:
        """One message, behind those before it."""
        self._to_client_s = self.network.arrival_s(self._to_client_s)
        self.network.carry(self, self.client, self._to_client_s, arrive)

    # --- the server's side ---------------------------------------------------------------------

    def arrived(self) -> None:
        """The request is at the server."""
        assert self.host is not None
        if self.silent == "request" or self._handler_void:
            return
        if not self.host.serving:
            self.to_client(
                lambda: self._finish(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
            )
            return
        self._handler = self.host.start_handler(self)
        if self.deadline_s is not None:
            # The server knows the deadline, and needs no client to remind it.
            loop = asyncio.get_running_loop()
            timer = loop.call_at(self.deadline_s, self._void)
            self._handler.add_done_callback(lambda _: timer.cancel())

    def duplicate_later(self, after_s: float) -> None:
        """The request comes once more; nobody hears what becomes of it."""

        def again() -> None:
            if self.host is not None and self.host.serving:
                self.host.start_handler(self, heard=False)

        loop = asyncio.get_running_loop()
        loop.call_later(after_s, again, context=_of(self.server))

    async def write(self, message: bytes) -> None:
        """From the handler; waits while too much is on its way."""
        while self._on_the_way >= self.network.faults.window and not self._handler_void:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        if self._handler_void:
            raise grpc.aio.InternalError("the call is gone")
        self._on_the_way += 1
        if self.silent != "answer":
            self.to_client(lambda: self._receive(message))

    def end(self, code: grpc.StatusCode, details: str, trailing: _Metadata) -> None:
        """The handler is done."""
        if self.silent != "answer" and not self._handler_void:
            self.to_client(lambda: self._finish(code, details, trailing))

    def _made_room(self) -> None:
        self._on_the_way -= 1
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _void(self) -> None:
        """Nobody waits for the handler any more."""
        self._handler_void = True
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        if self._handler is not None:
            self._handler.cancel()


class VirtualContext:
    """The servicer's view of a call."""

    def __init__(self, call: VirtualCall, serialize: Callable[[Any], bytes], heard: bool) -> None:
        self._call = call
        self._serialize = serialize
        self._heard = heard
        self.status: tuple[grpc.StatusCode, str, _Metadata] | None = None

    def time_remaining(self) -> float | None:
        deadline_s = self._call.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - _now())

    def invocation_metadata(self) -> _Metadata:
        return self._call.metadata

    async def write(self, message: Any) -> None:
        data = self._serialize(message)
        if self._heard:
            await self._call.write(data)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: _Metadata = ()
    ) -> None:
        self.status = (code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("Locally aborted.")


class VirtualServer:
    """Stands for what `grpc.aio.server` gives."""

    def __init__(
        self, network: VirtualNetwork, process: SimProcess, interceptors: tuple[Any, ...]
    ) -> None:
        self._network = network
        self.process = process
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._address = ""
        self.running: dict[asyncio.Task[None], None] = {}
        self.serving = False

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones below are the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def add_insecure_port(self, address: str) -> int:
        self._address = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        self._network.listen(self._address, self)
        self.serving = True

    async def stop(self, grace: float | None) -> None:
        self._network.unlisten(self)
        self.serving = False
        if self.running and grace:
            await asyncio.wait(tuple(self.running), timeout=grace)
        rest = tuple(self.running)
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest)

    def start_handler(self, call: VirtualCall, *, heard: bool = True) -> asyncio.Task[None]:
        """Serve a call in this server's process."""
        task = self.process.spawn(self._serve(call, heard), name=call.method)
        self.running[task] = None
        task.add_done_callback(lambda done: self.running.pop(done, None))
        return task

    async def _serve(self, call: VirtualCall, heard: bool) -> None:
        handler = await self._intercepted(call)
        if handler is None:
            call.end(grpc.StatusCode.UNIMPLEMENTED, call.method, ())
            return
        context = VirtualContext(call, handler.response_serializer, heard)
        status: tuple[grpc.StatusCode, str, _Metadata] = (grpc.StatusCode.OK, "", ())
        try:
            await self._handle(handler, handler.request_deserializer(call.request), context)
        except asyncio.CancelledError:
            status = context.status or (grpc.StatusCode.CANCELLED, "cancelled by the server", ())
            raise
        except grpc.aio.AbortError:
            status = context.status or (grpc.StatusCode.UNKNOWN, "aborted", ())
        except Exception as error:  # noqa: BLE001 - as gRPC does
            status = (grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}", ())
        finally:
            if heard:
                call.end(*status)

    async def _intercepted(self, call: VirtualCall) -> Any:
        async def found(_: object) -> Any:
            return self._handlers.get(call.method)

        details = _CallDetails(call.method, call.metadata)
        handler: Any = await found(details)
        for interceptor in self._interceptors:
            handler = await interceptor.intercept_service(found, details)
        return handler

    @staticmethod
    async def _handle(handler: Any, request: Any, context: VirtualContext) -> None:
        if handler.response_streaming:
            answer = handler.unary_stream(request, context)
            if inspect.isasyncgen(answer):
                async for message in answer:
                    await context.write(message)
            else:
                await answer
        else:
            await context.write(await handler.unary_unary(request, context))


@dataclass(frozen=True, slots=True)
class _CallDetails:
    method: str
    invocation_metadata: _Metadata


class VirtualChannel:
    """Stands for what `grpc.aio.insecure_channel` gives."""

    def __init__(self, network: VirtualNetwork, address: str, client: SimProcess) -> None:
        self._network = network
        self._address = address
        self._client = client
        self._calls: list[VirtualCall] = []
        self._closed = False

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, *_: Any, **__: Any
    ) -> Callable[..., VirtualCall]:
        return self._method(method, request_serializer, response_deserializer, streaming=False)

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, *_: Any, **__: Any
    ) -> Callable[..., VirtualCall]:
        return self._method(method, request_serializer, response_deserializer, streaming=True)

    def stream_stream(self, *_: Any, **__: Any) -> None:
        """AMPD has no such method: reflection's stub asks for one."""

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        for call in self._calls:
            call.cancel()

    def _method(
        self, method: str, serialize: Any, deserialize: Any, *, streaming: bool
    ) -> Callable[..., VirtualCall]:
        def begin(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: _Metadata = (),
            **_: Any,
        ) -> VirtualCall:
            if self._closed:
                raise grpc.aio.UsageError("Channel is closed.")
            self._calls = [call for call in self._calls if not call.done()]
            call = VirtualCall(
                self._network,
                self._address,
                method,
                serialize(request),
                streaming=streaming,
                deserialize=deserialize,
                timeout_s=timeout,
                metadata=metadata,
            )
            self._calls.append(call)
            return call

        return begin
