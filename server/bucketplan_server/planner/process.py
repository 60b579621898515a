"""A planning process from inside: calls come in over one socket, one at a time, answers go back.

Started by `bucketplan_server.planner.pool` as ``python -m bucketplan_server.planner FD MEMORY_BYTES TIMEOUT_SECONDS``.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import traceback
from collections.abc import Sequence

from bucketplan_server.planner import worker
from bucketplan_server.planner.calls import frame_answer, frame_failure, read_call
from bucketplan_server.planner.frames import HEADER_BYTES, body_length

__all__ = ["main"]

_DRAINED_BYTES = 65_536


def main(arguments: Sequence[str]) -> None:
    """Serve the socket `FD` within the limits until the server closes it or ends, however that ends."""
    descriptor, memory_bytes, timeout_seconds = int(arguments[0]), int(arguments[1]), float(arguments[2])
    with socket.socket(fileno=descriptor) as server:
        worker.initialize(memory_bytes, timeout_seconds)
        threading.Thread(target=_end_with_server, args=(server.fileno(),), name="end-with-server", daemon=True).start()
        while (header := _receive(server, HEADER_BYTES)) is not None:
            server.sendall(_answer(server, body_length(header)))


def _answer(server: socket.socket, num_bytes: int) -> bytes:
    try:
        body = _receive(server, num_bytes)
        if body is None:
            raise EOFError("the server went away amid a call")
        function, arguments = read_call(body)
        del body
        return frame_answer(worker.guarded(lambda: function(*arguments)))
    except MemoryError:
        return frame_answer(worker.TOO_MUCH_MEMORY)
    except EOFError:
        raise
    except Exception:  # whatever it is, the server is to know, and this process can go on
        return frame_failure(traceback.format_exc())


def _receive(server: socket.socket, num_bytes: int) -> bytearray | None:
    """Exactly so many bytes, None if the server went away; raises `MemoryError` with the bytes consumed."""
    try:
        data = bytearray(num_bytes)
    except MemoryError:
        _drain(server, num_bytes)
        raise
    view = memoryview(data)
    while view:
        num_read = server.recv_into(view)
        if num_read == 0:
            return None
        view = view[num_read:]
    return data


def _drain(server: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        got = len(server.recv(min(num_bytes, _DRAINED_BYTES)))
        if got == 0:
            return
        num_bytes -= got


def _end_with_server(descriptor: int) -> None:
    # A server that was killed cannot say goodbye, and while a plan is made nobody reads the socket.
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is reported without being asked for
    poll.poll()
    os._exit(1)
