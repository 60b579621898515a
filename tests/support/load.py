"""Load on a server with as little client as possible: raw keep-alive connections, so the client is not the limit."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Load:
    """Answers of one load: how many of each status, the different bodies, and what failed instead of answering."""

    statuses: Counter[int]
    bodies: frozenset[bytes]
    failures: tuple[str, ...]

    @property
    def num_errors(self) -> int:
        """Requests without a plan in their answer."""
        return len(self.failures) + sum(count for status, count in self.statuses.items() if status not in (200, 201))


def request_bytes(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """One HTTP/1.1 request as it goes over the wire."""
    fields = {"Host": "127.0.0.1", **headers}
    if body:
        fields["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of one answer with a Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


async def send_all(url: str, payload: bytes, *, num_requests: int, num_connections: int) -> Load:
    """Send `payload` `num_requests` times over `num_connections` connections that are all open at once."""
    address = urlsplit(url)
    statuses: Counter[int] = Counter()
    bodies: set[bytes] = set()
    failures: list[str] = []
    left = num_requests
    ready = asyncio.Semaphore(0)
    go = asyncio.Event()

    async def connection() -> None:
        nonlocal left
        writer = None
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                ready.release()
                await go.wait()
                while left > 0:
                    left -= 1
                    writer.write(payload)
                    status, body = await read_answer(reader)
                    statuses[status] += 1
                    bodies.add(body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            ready.release()
            failures.append(f"{type(error).__name__}: {error}")
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    tasks = [asyncio.create_task(connection()) for _ in range(num_connections)]
    for _ in tasks:
        await ready.acquire()
    go.set()
    await asyncio.gather(*tasks)
    return Load(statuses, frozenset(bodies), tuple(failures))
