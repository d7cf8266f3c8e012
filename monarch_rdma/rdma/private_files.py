"""Files of this user alone, each there as long as the process that made it.

They lie in one directory of mode 0700. Their maker holds a lock on each, so that those which a killed process left
behind are known as such, and go when the next one is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import weakref
from collections.abc import Callable, Iterator

from .. import config
from ..errors import ConfigError

__all__ = ["PrivateFile", "living", "private_directory", "socket_directory"]


class PrivateFile:
    """A new file of mode 0600 whose name ends in `suffix`, filled by `write(path)`; removed by `close`, by letting go
    of it, and at the end of the process. Raises ConfigError where there can be no such file.
    """

    def __init__(self, suffix: str, write: Callable[[str], None]) -> None:
        directory = private_directory()
        self.path = os.path.join(directory, f"{os.getpid()}-{secrets.token_hex(8)}{suffix}")
        try:
            lock = _made(directory, self.path, suffix, write)
        except OSError as error:
            raise ConfigError(
                f"a private file cannot be made in {directory!r}: {error.strerror}; set runtime_dir"
            ) from error
        self.close = weakref.finalize(self, _remove, self.path, lock, os.getpid())


def _made(directory: str, path: str, suffix: str, write: Callable[[str], None]) -> int:
    """Removes what dead makers left, makes the file, and returns the lock that says that its maker lives."""
    guard = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for entry in os.scandir(directory):
            if entry.name.endswith(suffix):
                _remove_if_stale(entry.path)
        write(path)
        return _lock(path, fcntl.LOCK_SH)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(guard)


def living(suffix: str) -> Iterator[str]:
    """The paths of such files whose makers live."""
    for entry in sorted(os.scandir(private_directory()), key=lambda entry: entry.name):
        if entry.name.endswith(suffix) and not _is_stale(entry.path):
            yield entry.path


def private_directory() -> str:
    """Made if need be. Raises ConfigError where it cannot be made, or is not ours alone."""
    path = os.path.join(config.runtime_directory(), f"monarch_rdma-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as error:
        raise ConfigError(
            f"directory {path!r} for secrets cannot be made: {error.strerror}; set runtime_dir"
        ) from error
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise ConfigError(f"{path!r} is not a directory of ours with mode 0700; remove it, or set runtime_dir")
    return path


def socket_directory(setting: str) -> str:
    """What option unix_socket_dir means: the directory, made if need be, or "" for none.

    Raises ConfigError where a directory that was asked for cannot be made. The private one is no must.
    """
    if setting == "none":
        return ""
    if not setting:
        try:
            return private_directory()
        except ConfigError:
            return ""
    path = os.path.abspath(setting)
    try:
        os.makedirs(path, 0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"option unix_socket_dir is {setting!r}, which cannot be made: {error.strerror}") from error
    return path


def _lock(path: str, how: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_stale(path: str) -> bool:
    try:
        os.close(_lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True  # gone meanwhile
    return True


def _remove_if_stale(path: str) -> None:
    try:
        lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # in use, or gone
    os.unlink(path)
    os.close(lock)


def _remove(path: str, lock: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork of the maker ends
    with contextlib.suppress(FileNotFoundError):  # somebody cleaned up the whole directory
        os.unlink(path)
    os.close(lock)
