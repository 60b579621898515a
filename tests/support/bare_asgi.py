"""The least ASGI application that answers bytes, on the same uvicorn: what a served plan is measured against.

python -m tests.support.bare_asgi PORT PATH FILE [PATH FILE]...      GET of a path answers its file
"""

import sys
from pathlib import Path

import uvicorn


def application(bodies: dict[str, bytes]):
    answers = {
        path: (
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/msgpack"), (b"content-length", str(len(body)).encode())],
            },
            {"type": "http.response.body", "body": body},
        )
        for path, body in bodies.items()
    }

    async def app(scope, receive, send):
        start, body = answers[scope["path"]]
        await send(start)
        await send(body)

    return app


def main() -> None:
    port, *files = sys.argv[1:]
    app = application({path: Path(file).read_bytes() for path, file in zip(files[::2], files[1::2], strict=True)})
    uvicorn.run(
        app, port=int(port), loop="uvloop", http="httptools", ws="none", lifespan="off", access_log=False,
        server_header=False, log_level="warning", backlog=4096,
    )  # fmt: skip


if __name__ == "__main__":
    main()
