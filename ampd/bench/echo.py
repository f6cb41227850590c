"""Raw gRPC as a yardstick: a server that streams messages back, and a proxy in front of it.

`python -m ampd.bench.echo` is the server, `... HOST:PORT` a proxy to one there. Prints its own
address, and ends with its input. No message is parsed anywhere: what a hop costs at least.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import uvloop

METHOD: Final = "/ampd.bench.Echo/Stream"
COUNT: Final = struct.Struct("<I")
"""A request: how often its payload, which follows, comes back."""
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 5.0


class _Server(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return grpc.unary_stream_rpc_method_handler(self._stream)

    async def _stream(self, request: bytes, context: object) -> AsyncGenerator[bytes, None]:
        (count,) = COUNT.unpack_from(request)
        for _ in range(count):
            yield request[COUNT.size :]


class _Proxy(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        self._call = channel.unary_stream(METHOD)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return grpc.unary_stream_rpc_method_handler(self._stream)

    async def _stream(self, request: bytes, context: object) -> AsyncGenerator[bytes, None]:
        async for message in self._call(request):
            yield message


@asynccontextmanager
async def started(upstream: str = "") -> AsyncIterator[tuple[str, int]]:
    """The server, or the proxy to `upstream`, as a process: its address and process id."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ampd.bench.echo",
        *([upstream] if upstream else []),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None  # noqa: S101 - asked for
    assert process.stdout is not None  # noqa: S101
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            address = (await process.stdout.readline()).decode().strip()
        yield address, process.pid
        process.stdin.close()
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _serve(upstream: str) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    async with grpc.aio.insecure_channel(upstream or "127.0.0.1:1") as channel:
        server.add_generic_rpc_handlers((_Proxy(channel) if upstream else _Server(),))
        await server.start()
        sys.stdout.write(f"127.0.0.1:{port}\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await server.stop(0)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1] if len(sys.argv) > 1 else ""))
