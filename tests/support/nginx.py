"""A real nginx with the configuration of deploy/nginx: the same files, with ports and paths of a test."""

import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme

from tests.support.paths import ROOT
from tests.support.server import free_port
from tests.support.tools import tool

DEPLOYED = ROOT / "deploy" / "nginx"
_START_SECONDS = 30.0


@dataclass(frozen=True)
class Proxy:
    """Where the proxy listens, and the certificate of the authority that signed its own."""

    url: str
    ca_file: Path


def write_configuration(folder: Path, *, port: int, replicas: Sequence[int]) -> tuple[Path, Path]:
    """deploy/nginx with another port, other replicas and other paths, in `folder`; (main file, CA certificate).

    Each replacement must find what it replaces, so a changed file cannot be tested in a form that nobody deploys.
    """
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    certificate.private_key_pem.write_to_path(folder / "tls.key")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(folder / "tls.crt", append=True)

    servers = "\n".join(f"    server 127.0.0.1:{replica} max_fails=1 fail_timeout=2s;" for replica in replicas)
    site = _replace(
        (DEPLOYED / "bucketplan.conf").read_text(),
        {
            r"( +server plans-\d\.internal:8321 max_fails=1 fail_timeout=2s;\n?)+": f"{servers}\n",
            r"listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            r"/etc/bucketplan/tls/": f"{folder}/",
            r"/var/log/nginx/": f"{folder}/",
        },
    )
    (folder / "bucketplan.conf").write_text(site)
    main = _replace(
        (DEPLOYED / "nginx.conf").read_text(),
        {
            r"(?<= )/tmp/": f"{folder}/",
            r"/etc/nginx/conf\.d/": f"{folder}/",
            r"/dev/stderr": f"{folder}/error.log",
            r"worker_processes auto": "worker_processes 2",
        },
    )
    if os.geteuid() == 0:
        # Started by root, nginx gives its workers to nobody, who may not enter the folders of a test.
        main = f"user root;\n{main}"
    (folder / "nginx.conf").write_text(main)
    return folder / "nginx.conf", folder / "ca.crt"


def check_configuration(main: Path) -> str:
    """What `nginx -t` says about a configuration; raises `AssertionError` with it where it is not valid."""
    nginx = tool("nginx", package="nginx")
    command = [nginx, "-t", "-p", str(main.parent), "-e", str(main.parent / "error.log"), "-c", str(main)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@contextlib.contextmanager
def running_nginx(folder: Path, replicas: Sequence[int]) -> Iterator[Proxy]:
    """A proxy in the foreground, ended with the block."""
    port = free_port()
    main, ca_file = write_configuration(folder, port=port, replicas=replicas)
    nginx = tool("nginx", package="nginx")
    command = [nginx, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(main), "-g", "daemon off;"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((folder / "error.log").read_text())
            time.sleep(0.05)
        yield Proxy(f"https://127.0.0.1:{port}", ca_file)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _replace(text: str, replacements: dict[str, str]) -> str:
    for pattern, replacement in replacements.items():
        text, found = re.subn(pattern, lambda _, new=replacement: new, text)
        assert found, f"{pattern} is no longer in the configuration"
    return text
