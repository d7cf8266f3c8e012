"""Files that tell where a worker loop listens: to processes of its host (`ipc://path`), or to all that see the file on
shared storage (`file://path`).

On its own host the worker loop holds a lock on its file as long as it lives, so that a file which was left behind is
known as such. Locks of shared storage cannot be relied on: there the file appears whole, the next worker loop replaces
it, and who finds nobody at the address in it looks again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from types import TracebackType

from ...errors import ConfigError, PeerLost, ResourceExhausted

__all__ = ["Claim", "SharedClaim", "read", "read_shared"]

_LONGEST = 4096  # bytes of an address
_READERS_PATIENCE = 1.0  # seconds: readers lock the file for a moment too


class Claim:
    """A path that is ours. ResourceExhausted where another process has it, ConfigError where it is no such file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._fd = _claim(path)
        os.ftruncate(self._fd, 0)

    def tell(self, address: str) -> None:
        """From now on who reads the file finds this address."""
        os.pwrite(self._fd, address.encode(), 0)

    def release(self) -> None:
        """Removes the file. Does nothing the second time, nor in a fork."""
        fd, self._fd = self._fd, -1
        if fd != -1:
            if os.getpid() == self._pid:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            os.close(fd)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class SharedClaim:
    """A path on shared storage where this process will tell its address. ConfigError where it cannot be written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._told = ""
        if not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
            raise ConfigError(f"file://{path} cannot be made: its directory is not there, or may not be written")

    def tell(self, address: str) -> None:
        """From now on who reads the file finds this address, whole."""
        draft = f"{self._path}.{secrets.token_hex(4)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, address.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(draft, self._path)
        self._told = address

    def release(self) -> None:
        """Removes the file, unless another worker loop has put its own there. Does nothing in a fork."""
        told, self._told = self._told, ""
        if told and os.getpid() == self._pid:
            with contextlib.suppress(PeerLost, OSError):  # removed already, with its directory perhaps
                if read_shared(self._path) == told:
                    os.unlink(self._path)


def read_shared(path: str) -> str:
    """The address that a worker loop has left at `path` last. Raises PeerLost where there is none (yet)."""
    fd = _open(path, f"file://{path}", f"no worker loop has told its address in {path}")
    try:
        _check(fd, path)
        return os.pread(fd, _LONGEST, 0).decode("utf-8", "replace")
    finally:
        os.close(fd)


def read(path: str) -> str:
    """The address that a living worker loop has left at `path`. Raises PeerLost where there is none (yet)."""
    fd = _open(path, f"ipc://{path}", f"no worker loop listens at ipc://{path}")
    try:
        _check(fd, path)
        if _try_lock(fd, fcntl.LOCK_SH):
            raise PeerLost(f"no worker loop listens at ipc://{path} any more: its process has ended", peer=path)
        address = os.pread(fd, _LONGEST, 0).decode("utf-8", "replace")
    finally:
        os.close(fd)
    if not address:
        raise PeerLost(f"the worker loop at ipc://{path} is not ready yet", peer=path)
    return address


def _open(path: str, called: str, absent: str) -> int:
    """The file, to be read. Raises PeerLost where there is none, saying `absent`, and ConfigError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise PeerLost(f"{absent}: there is no such file", peer=path) from None
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}", sys_errno=error.errno or 0) from error


def _claim(path: str) -> int:
    """The file, made if need be, open and locked."""
    deadline = time.monotonic() + _READERS_PATIENCE
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise ConfigError(f"ipc://{path} cannot be made: {error.strerror}", sys_errno=error.errno or 0) from error
        try:
            _check(fd, path)
            if _try_lock(fd, fcntl.LOCK_EX) and _is_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() > deadline:
            raise ResourceExhausted(f"address ipc://{path} is taken: a worker loop listens there", operation="listen")
        time.sleep(0.01)


def _check(fd: int, path: str) -> None:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        raise ConfigError(f"{path} is not a regular file of ours")
    start = os.pread(fd, _LONGEST, 0)
    if start and not start.startswith(b"mrdma://"):
        raise ConfigError(f"{path} is a file with something else in it; it stays as it is")


def _try_lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: str) -> bool:
    """Whether the file is still the one at its path: whoever had it before may have removed it."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
