"""The job secret: what tells members of a job from strangers. It travels by file descriptor or in a private file."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat

from .. import config
from ..errors import ConfigError

__all__ = ["Secret", "configured_secret"]

_MIN_BYTES = 16
_MAX_BYTES = 4096


class Secret:
    """A job secret of 16 to 4096 bytes. Printing it does not show it, and it cannot be pickled."""

    __slots__ = ("_bytes",)

    def __init__(self, data: bytes) -> None:
        """`data` is the secret itself. Raises ConfigError where it is too short or too long."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ConfigError(f"data is a {type(data).__name__}, but a secret is made of bytes")
        data = bytes(data)
        if not _MIN_BYTES <= len(data) <= _MAX_BYTES:
            raise ConfigError(f"a secret has {_MIN_BYTES} to {_MAX_BYTES} bytes, but this one has {len(data)}")
        self._bytes = data

    @classmethod
    def generate(cls) -> Secret:
        """A new random secret of 32 bytes."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Secret:
        """Reads a secret. ConfigError unless it is a regular file of ours that nobody else can read."""
        if not isinstance(path, str | os.PathLike) or not config.is_plain(path := os.fspath(path)):
            raise ConfigError(f"secret_file is {path!r:.200}, but must be the path of a file")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ConfigError(
                f"secret file {path!r} cannot be read: {error.strerror}", sys_errno=error.errno or 0
            ) from error
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"secret file {path!r} is not a regular file")
            if facts.st_uid != os.geteuid():
                raise ConfigError(f"secret file {path!r} belongs to user {facts.st_uid}, not to us ({os.geteuid()})")
            if facts.st_mode & 0o077:
                mode = f"{stat.S_IMODE(facts.st_mode):04o}"
                raise ConfigError(f"secret file {path!r} has mode {mode}, so others can use it; run: chmod 600 {path}")
            data = os.read(fd, _MAX_BYTES + 1)
        finally:
            os.close(fd)
        if not _MIN_BYTES <= len(data) <= _MAX_BYTES:
            raise ConfigError(
                f"secret file {path!r} must hold {_MIN_BYTES} to {_MAX_BYTES} bytes, but has {facts.st_size}"
            )
        return cls(data)

    @classmethod
    def from_fd(cls, fd: int) -> Secret:
        """Reads a secret to the end of an inherited pipe, memfd or file, and closes it."""
        if type(fd) is not int or not 0 <= fd < 2**31:
            raise ConfigError(f"secret_fd is {fd!r:.200}, but must be the number of an open descriptor")
        try:
            facts = os.fstat(fd)
        except OSError as error:
            raise ConfigError(f"secret_fd {fd} is not open in this process: {error.strerror}") from error
        if not (stat.S_ISREG(facts.st_mode) or stat.S_ISFIFO(facts.st_mode)):
            raise ConfigError(f"secret_fd {fd} is neither a file nor a pipe")
        data = b""
        with open(fd, "rb", buffering=0) as file:
            while len(data) <= _MAX_BYTES:
                # pread: several children may share the position of one memfd.
                more = (
                    os.pread(fd, _MAX_BYTES + 1, len(data))
                    if stat.S_ISREG(facts.st_mode)
                    else file.read(_MAX_BYTES + 1)
                )
                if not more:
                    break
                data += more
        if not _MIN_BYTES <= len(data) <= _MAX_BYTES:
            raise ConfigError(f"secret_fd {fd} must give {_MIN_BYTES} to {_MAX_BYTES} bytes, but gave {len(data)}")
        return cls(data)

    def write_file(self, path: str | os.PathLike[str]) -> None:
        """Writes the secret to a new file of mode 0600. FileExistsError where there is something already."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)
            file.write(self._bytes)

    def to_fd(self) -> int:
        """A new inheritable descriptor that gives the secret: for `pass_fds` of subprocess. The caller closes it."""
        fd = os.memfd_create("monarch_rdma-secret", os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, self._bytes)
            os.lseek(fd, 0, os.SEEK_SET)
            os.set_inheritable(fd, True)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def digest(self) -> bytes:
        """A hash to compare secrets by, without showing them."""
        return hashlib.sha256(b"monarch_rdma secret" + self._bytes).digest()

    def reveal(self) -> bytes:
        """The bytes themselves, for the core."""
        return self._bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and secrets.compare_digest(self._bytes, other._bytes)

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return f"<Secret of {len(self._bytes)} bytes>"

    def __reduce__(self) -> str:
        raise ConfigError("a Secret cannot be pickled; hand it down with to_fd() or write_file()")


_from_fd: Secret | None = None  # the descriptor can be read only once


def configured_secret() -> Secret | None:
    """The secret that the options secret_file or secret_fd name, or None."""
    global _from_fd
    path = str(config.get("secret_file"))
    if path and int(config.get("secret_fd")) >= 0:
        raise ConfigError(f"both secret_file ({path!r}) and secret_fd are set; set one of them")
    fd = config.take_secret_fd()
    if fd >= 0:
        _from_fd = Secret.from_fd(fd)
    return Secret.from_file(path) if path else _from_fd
