"""One vLLM engine in its own process, spoken to over a unix socket (see `engine_harness.py`).

Arguments: socket path, pickled (settings, worker_id, incarnation) in hex.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from functools import partial
from typing import Any


async def read_frame(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return pickle.loads(await reader.readexactly(size))  # noqa: S301 - from our own parent


def write_frame(writer: asyncio.StreamWriter, frame: object) -> None:
    data = pickle.dumps(frame)
    writer.write(len(data).to_bytes(4, "big") + data)


async def serve(socket_path: str, arguments: tuple[Any, ...]) -> None:
    from ampd.adapters.engine_vllm import start

    engine = await start(*arguments)
    stopped = asyncio.Event()

    async def call(number: int, method: str, args: tuple[Any, ...], writer: Any) -> None:
        try:
            if method == "generate":
                stream = engine.generate(*args)
                try:
                    async for event in stream:
                        write_frame(writer, (number, "event", event))
                finally:
                    await stream.aclose()
                write_frame(writer, (number, "end", None))
                return
            if method == "info":
                result: Any = engine.info
            elif method == "cpu_s":
                result = time.process_time()
            elif method == "evict":
                result = await engine._call(engine._thread._llm.reset_prefix_cache)
            elif method == "forget":
                pins = engine._thread._scheduler.pins
                for pin_id in list(pins._pins):
                    await engine._call(partial(pins.release, pin_id))
                result = await engine._call(engine._thread._llm.reset_prefix_cache)
            else:
                result = getattr(engine, method)(*args)
                if asyncio.iscoroutine(result):
                    result = await result
            write_frame(writer, (number, "result", result))
        except asyncio.CancelledError:
            write_frame(writer, (number, "cancelled", None))
        except Exception as error:  # noqa: BLE001 - the other side raises it
            write_frame(writer, (number, "error", error))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                number, method, args = await read_frame(reader)
                if method == "cancel":
                    if task := tasks.get(args[0]):
                        task.cancel()
                    continue
                task = asyncio.create_task(call(number, method, args, writer))
                tasks[number] = task
                task.add_done_callback(lambda _, n=number: tasks.pop(n))
        except asyncio.IncompleteReadError:
            stopped.set()

    server = await asyncio.start_unix_server(client, socket_path)
    await stopped.wait()
    server.close()
    await engine.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2]))))  # noqa: S301
