"""The private directory of one job, which its client and all its hosts see: its secret, and where agents listen."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from .. import config
from ..actor.joining.worker_address import FileAddress, parse
from ..errors import ConfigError
from ..rdma.secret import Secret

__all__ = ["JobFolder"]


class JobFolder:
    """`path` is a directory of mode 0700 with the files `secret` (mode 0600), `state`, and one for each agent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, apply_id: str, secret: Secret) -> JobFolder:
        """Below option job_dir. Raises ConfigError where that cannot be."""
        above = Path(str(config.get("job_dir")) or Path.home() / ".monarch_rdma" / "jobs")
        path = above / apply_id
        try:
            above.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"directory {str(path)!r} for a job's private files cannot be made: {error.strerror}; "
                "set option job_dir to one that all hosts of the job see"
            ) from error
        secret.write_file(path / "secret")
        return cls(path)

    @property
    def secret_file(self) -> Path:
        return self.path / "secret"

    @property
    def state_file(self) -> Path:
        return self.path / "state"

    def agent_address(self, mesh: str, rank: int | str, *, is_shared: bool) -> str:
        """Where the agent of that host listens. `is_shared`: hosts see the directory over shared storage. `rank` may be
        a shell's variable.
        """
        scheme = "file" if is_shared else "ipc"
        return f"{scheme}://{self.path}/{mesh}.{rank}.address"

    def has_told(self, address: str) -> bool:
        """Whether the agent has said where it listens."""
        where = parse(address)
        return isinstance(where, FileAddress) and Path(where.path).exists()

    def is_ours(self) -> bool:
        """Whether the directory is still there, and nobody else's."""
        try:
            facts = os.lstat(self.path)
        except OSError:
            return False
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077

    def remove(self) -> None:
        """With the secret. Idempotent."""
        if self.is_ours():
            shutil.rmtree(self.path, ignore_errors=True)
