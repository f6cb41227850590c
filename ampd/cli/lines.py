"""Lines that a person types, without blocking the event loop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

_CHUNK_BYTES = 65536


async def typed_lines() -> AsyncIterator[str]:
    """The lines of stdin until its end.

    stdin stays a blocking descriptor (a terminal shares it with stdout) and no thread waits on
    it (nothing could stop that thread at exit): it is read when the loop says it is readable.
    """
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    reader = asyncio.StreamReader()

    def read() -> bool:
        data = os.read(descriptor, _CHUNK_BYTES)
        if data:
            reader.feed_data(data)
        else:
            reader.feed_eof()
            loop.remove_reader(descriptor)
        return bool(data)

    try:
        loop.add_reader(descriptor, read)
    except PermissionError:  # a plain file: always readable, so nothing to wait for
        while read():
            pass
    try:
        while line := await reader.readline():
            yield line.decode(errors="replace").rstrip("\r\n")
    finally:
        loop.remove_reader(descriptor)
