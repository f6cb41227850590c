"""The side channel between engines: NIXL handshakes, and the end of reads.

vLLM's own listener answers handshakes alone. This one speaks the same protocol and one
message more; it runs in the owner's process, on its own thread, so that a busy engine
answers at once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing

import msgspec
import zmq

HANDSHAKE = b"get_meta_msg"
"""vLLM's question: (HANDSHAKE, pp_rank, tp_rank)."""
LOAN_READ = b"ampd_loan_read"
"""Ours: (LOAN_READ, loan_id, 0), after the read; the answer is one byte: was it alive?"""
CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 2.0
STOP_POLL_MS = 200
LISTENER_BACKLOG = 1024
"""Waiting questions; beyond it the askers time out, and recompute."""


def can_connect(host: str, port: int) -> bool:
    """Whether somebody listens there: a dead process refuses at once."""
    try:
        with closing(socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)):
            return True
    except OSError:
        return False


def confirm_read(host: str, port: int, loan_id: str) -> bool:
    """Tell the owner that its KV was read, and learn whether the loan was alive until then: no
    answer is a no. Blocks for at most about 3 s."""
    if not can_connect(host, port):
        return False
    with closing(_socket(zmq.REQ)) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, int(ANSWER_TIMEOUT_S * 1e3))
        sock.setsockopt(zmq.SNDTIMEO, int(ANSWER_TIMEOUT_S * 1e3))
        sock.connect(f"tcp://{host}:{port}")
        try:
            sock.send(msgspec.msgpack.encode((LOAN_READ, loan_id, 0)))
            return bool(sock.recv() == b"\x01")
        except zmq.ZMQError:
            return False


def _socket(kind: int) -> zmq.Socket[bytes]:
    return zmq.Context.instance().socket(kind)


def serve(
    handshakes: Mapping[tuple[int, int], bytes],
    loan_read: Callable[[str], bool],
    ready: threading.Event,
    stop: threading.Event,
    address: tuple[str, int],
) -> None:
    """Answer until `stop` is set. Malformed questions are dropped."""
    host, port = address
    with closing(_socket(zmq.ROUTER)) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, LISTENER_BACKLOG)
        sock.setsockopt(zmq.SNDHWM, LISTENER_BACKLOG)
        sock.bind(f"tcp://{host}:{port}")
        ready.set()
        while not stop.is_set():
            if not sock.poll(STOP_POLL_MS):
                continue
            frames = sock.recv_multipart()
            answer = _answer(frames, handshakes, loan_read)
            if answer is not None:
                sock.send_multipart(answer)


def _answer(
    frames: list[bytes],
    handshakes: Mapping[tuple[int, int], bytes],
    loan_read: Callable[[str], bool],
) -> list[bytes] | None:
    try:
        identity, empty, body = frames
        kind, first, second = msgspec.msgpack.decode(body)
        if kind == LOAN_READ:
            return [identity, empty, b"\x01" if loan_read(first) else b"\x00"]
        # vLLM measures the offset of the clocks by the second part.
        clock = msgspec.msgpack.encode(time.perf_counter())
        return [identity, empty, handshakes[first, second], clock]
    except (ValueError, TypeError, KeyError, msgspec.MsgspecError):
        return None
