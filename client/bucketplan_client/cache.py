"""Plans on the local disk, so that a job starts again while the server is away.

    blobs/<2 hex>/<digest>.plan            a plan by its decision digest
    index/<2 hex>/<signature>.<epoch id>   digest of the plan that this signature has under that epoch
    index/<2 hex>/<signature>.planner      digest of what the planner alone gives, under any epoch without an override
    epochs/<job>/<epoch id>.epoch          an epoch that an attempt of the job committed to

The index has the epoch in its name: a plan that an operator activated for one attempt must not come back in another.
Files are written whole under another name and then renamed, so readers see all of a file or none of it, whichever of
the host's processes writes; what is read is verified against its name, and thrown away if it is something else.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bucketplan_client.errors import CacheDamaged
from bucketplan_client.files import UnfitFile, read_small_file
from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import BucketplanError
from bucketplan_core.fields import is_digest
from bucketplan_core.plan import Plan

__all__ = [
    "DEFAULT_CACHE",
    "DEFAULT_MAX_BYTES",
    "CacheStatistics",
    "DefaultCache",
    "PlanCache",
    "default_cache",
    "default_cache_folder",
]

_LOG = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 512 * 2**20
"""Some ten thousand plans of large models."""
_MAX_FILE_BYTES = 64 * 2**20
"""What the client takes of the server at most; no file of the cache is larger."""
_DIGEST_BYTES = 64
_KEEP_EPOCHS = 8
_TRIM_TO = 0.8
"""A trim goes below the bound by this much, so that the next write does not trim again."""
_LOOK_EVERY = 64
"""Files are counted at a process's first write and each time it has written this fraction of the bound."""
_STALE_TEMPORARY_S = 3_600.0
_PLANNER = "planner"


def default_cache_folder() -> Path:
    """``BUCKETPLAN_CACHE``, else `bucketplan` in the user's cache folder (XDG Base Directory Specification).

    ``/dev/null`` stands for no cache.

    For a user without a home, as containers have, it is a folder that cannot exist, so nothing is cached: what every
    user may write to, such as /tmp, could hold the plans of another one.
    """
    named = os.environ.get("BUCKETPLAN_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "bucketplan"
    except RuntimeError:
        return Path(os.devnull) / "no-home-set-BUCKETPLAN_CACHE"


def default_cache() -> PlanCache | None:
    """The plan cache of this user on this host; None for ``/dev/null`` and for a user without a home."""
    folder = default_cache_folder()
    if Path(os.devnull) in (folder, *folder.parents):
        _LOG.info("without a plan cache: its folder is %s", folder)
        return None
    return PlanCache(folder)


class DefaultCache(enum.Enum):
    """Says "the cache of this host" where a cache may be given, or None for none."""

    OF_THIS_HOST = "the host's plan cache"


DEFAULT_CACHE = DefaultCache.OF_THIS_HOST


@dataclass(slots=True)
class CacheStatistics:
    """What one process saw of its cache."""

    num_hits: int = 0
    num_misses: int = 0
    num_damaged: int = 0
    num_evicted: int = 0


class PlanCache:
    """The cache in `folder`, at most `max_bytes` of it; any number of processes may share it.

    Reading and writing never raise: a cache that does not work costs a request to the server, not a job.
    """

    def __init__(self, folder: Path | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.folder = default_cache_folder() if folder is None else folder
        self.max_bytes = max_bytes
        self.statistics = CacheStatistics()
        self._written_bytes: int | None = None
        self._has_warned = False

    def plan(self, signature: str, epoch: Epoch) -> Plan | None:
        """The plan of `signature` under `epoch`, None when it is not here, whole and legal to use."""
        override = epoch.digest_for(signature)
        names = [epoch.id] if override is not None else [epoch.id, _PLANNER]
        for name in names:
            index = self._index(signature, name)
            data = self._read(index, most_bytes=_DIGEST_BYTES)
            digest = data.decode("ascii", "replace") if data is not None else None
            if digest is None:
                continue
            if not is_digest(digest):
                self._discard(index, "it holds no digest")
                continue
            plan = self._blob(digest, signature)
            if plan is not None and override in (None, digest):
                self.statistics.num_hits += 1
                self._mark_used(self._blob_path(digest), epoch, *(self._index(signature, name) for name in names))
                return plan
        self.statistics.num_misses += 1
        return None

    def keep(self, plan: Plan, epoch: Epoch) -> None:
        """Remember `plan` as what its signature has under `epoch`."""
        signature = plan.decision.signature
        names = [epoch.id] if epoch.digest_for(signature) is not None else [epoch.id, _PLANNER]
        if self._write(self._blob_path(plan.digest), plan.encoded):
            for name in names:
                self._write(self._index(signature, name), plan.digest.encode())
        self._trim_if_due()

    def keep_epoch(self, epoch: Epoch) -> None:
        """Remember that an attempt of the epoch's job committed to it."""
        folder = self._epochs(epoch.job)
        self._write(folder / f"{epoch.id}.epoch", epoch.encoded)
        for path in _newest_first(folder)[_KEEP_EPOCHS:]:
            with suppress(OSError):
                _remove(path)
        self._trim_if_due()

    def epochs(self, job: str) -> list[str]:
        """Ids of the epochs that attempts of `job` committed to, the latest first."""
        names = (path.name.removesuffix(".epoch") for path in _newest_first(self._epochs(job)))
        return [name for name in names if is_digest(name)]

    def epoch(self, job: str, epoch_id: str) -> Epoch | None:
        """The epoch, None when it is not here and whole."""
        path = self._epochs(job) / f"{epoch_id}.epoch"
        data = self._read(path)
        if data is None:
            return None
        try:
            epoch = Epoch.decode(data)
        except BucketplanError as error:
            self._discard(path, str(error))
            return None
        if epoch.id != epoch_id:
            self._discard(path, f"it hashes to {epoch.id}")
            return None
        return epoch

    def size_bytes(self) -> int:
        """Bytes of all files of the cache."""
        return sum(entry.stat().st_size for entry in self._files())

    def _blob(self, digest: str, signature: str) -> Plan | None:
        path = self._blob_path(digest)
        data = self._read(path)
        if data is None:
            return None
        try:
            plan = Plan.decode(data, expected_signature=signature)
        except BucketplanError as error:
            self._discard(path, str(error))
            return None
        if plan.digest != digest:
            self._discard(path, f"its decision hashes to {plan.digest}")
            return None
        return plan

    def _mark_used(self, blob: Path, epoch: Epoch, *indexes: Path) -> None:
        # What was used last stays longest, a plan with all that leads to it; mtime, since many file systems do not
        # record reads.
        for path in (blob, *indexes, self._epochs(epoch.job) / f"{epoch.id}.epoch"):
            with suppress(OSError):
                os.utime(path)

    def _blob_path(self, digest: str) -> Path:
        return self.folder / "blobs" / digest[:2] / f"{digest}.plan"

    def _index(self, signature: str, name: str) -> Path:
        return self.folder / "index" / signature[:2] / f"{signature}.{name}"

    def _epochs(self, job: str) -> Path:
        # Job names are the user's; a hash is a file name on every file system.
        return self.folder / "epochs" / hashlib.sha256(job.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def _read(self, path: Path, *, most_bytes: int = _MAX_FILE_BYTES) -> bytes | None:
        try:
            return read_small_file(path, most_bytes=most_bytes)
        except FileNotFoundError:
            return None
        except UnfitFile as unfit:
            self._discard(path, unfit.reason)
        except OSError as error:
            _LOG.warning("cannot read cached file %s: %s", path, error)
        return None

    def _write(self, path: Path, data: bytes) -> bool:
        # Ranks of a host, and of hosts that share a home, keep the same plans: most find them written.
        if self._holds(path, data):
            with suppress(OSError):
                os.utime(path)
            return True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.replace(temporary, path)
                except IsADirectoryError:
                    _remove(path)
                    os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            # A disk that is full or read-only fails every write alike.
            _LOG.log(
                logging.DEBUG if self._has_warned else logging.WARNING, "cannot write cached file %s: %s", path, error
            )
            self._has_warned = True
            return False
        if self._written_bytes is not None:
            self._written_bytes += len(data)
        return True

    def _holds(self, path: Path, data: bytes) -> bool:
        try:
            return read_small_file(path, most_bytes=len(data)) == data
        except (OSError, UnfitFile):
            return False

    def _discard(self, path: Path, reason: str) -> None:
        self.statistics.num_damaged += 1
        _LOG.warning("%s", CacheDamaged(str(path), reason))
        with suppress(OSError):
            _remove(path)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        pending = [str(self.folder)]
        while pending:
            try:
                entries = list(os.scandir(pending.pop()))
            except OSError:
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry

    def _trim_if_due(self) -> None:
        # Walking the folder at every write would cost more than the write. A process's first one counts what others
        # wrote before it, however little each of them did.
        if self._written_bytes is not None and self._written_bytes < self.max_bytes // _LOOK_EVERY:
            return
        self._written_bytes = 0
        self.trim()

    def trim(self) -> None:
        """Remove what was used longest ago until the cache is within its bound."""
        with self._lock() as mine:
            if not mine:
                return
            found: list[tuple[float, int, str]] = []
            for entry in self._files():
                with suppress(OSError):
                    status = entry.stat()
                    if entry.name.startswith(".tmp-") and time.time() - status.st_mtime > _STALE_TEMPORARY_S:
                        os.unlink(entry.path)
                    elif entry.name != "lock" and not entry.name.startswith(".tmp-"):
                        found.append((status.st_mtime, status.st_size, entry.path))
            total = sum(size for _, size, _ in found)
            if total <= self.max_bytes:
                return
            for _, size, path in sorted(found):
                if total <= self.max_bytes * _TRIM_TO:
                    return
                with suppress(OSError):
                    os.unlink(path)
                    total -= size
                    self.statistics.num_evicted += 1

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        """Whether this process got the trimming lock; another one that trims is as good."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Opened for reading too and without waiting: a named pipe of that name must not hold the process.
            handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            _LOG.warning("cannot lock the plan cache %s: %s", self.folder, error)
            yield False
            return
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True
        finally:
            os.close(handle)


def _remove(path: Path) -> None:
    """Remove what stands at `path`; a folder with something in it is moved aside, since none of that is ours."""
    try:
        path.unlink()
    except (IsADirectoryError, PermissionError):
        try:
            path.rmdir()
        except OSError:
            path.rename(path.with_name(f".damaged-{uuid.uuid4().hex}"))


def _newest_first(folder: Path) -> list[Path]:
    found: list[tuple[float, Path]] = []
    with suppress(OSError):
        for path in folder.glob("*.epoch"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, key=lambda item: (-item[0], item[1].name))]
