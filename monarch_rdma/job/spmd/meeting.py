"""How the ranks of a program find each other: in a private directory on storage that their hosts share.

A directory of an earlier run may still be there, and its secret must not be taken for ours. So each rank says a random
word (`hello`), rank 0 writes down its own and those that it has heard (`roll`), and who finds his own word there knows
that rank 0 lives and means this run. Then each rank says where it listens (`here`), with the word of rank 0, so that
rank 0 knows the same of it, and writes the table of all addresses (`table`), again with the words.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import config
from ...errors import ConfigError, TransferTimeout
from ...rdma.secret import Secret

__all__ = ["Meeting"]

_PAUSE, _LONGEST_PAUSE = 0.01, 0.25  # seconds between two looks


class Meeting:
    """One rank's part. `timeout`: seconds for each step; TransferTimeout names the ranks that are missing."""

    def __init__(self, run: str, rank: int, size: int, timeout: float) -> None:
        above = Path(str(config.get("job_dir")) or Path.home() / ".monarch_rdma" / "jobs")
        self.path = above / f"spmd-{run}"
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._word = secrets.token_hex(16)
        self._word_of_first = self._word  # of rank 0
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = os.lstat(self.path)
        except OSError as error:
            raise ConfigError(
                f"directory {str(self.path)!r} for the ranks to meet cannot be made: {error.strerror}; set job_dir"
            ) from error
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise ConfigError(
                f"{str(self.path)!r} is not a directory of ours with mode 0700; remove it, or set job_dir"
            )

    def secret(self, own: Secret | None) -> Secret:
        """The program's: that of rank 0, which makes one where it has none. Each rank writes its word."""
        if self._rank == 0:
            secret = own or Secret.generate()
            for name in ("secret", "roll", "table"):
                (self.path / name).unlink(missing_ok=True)
            secret.write_file(self.path / "secret")
        self._write(f"hello.{self._rank}", {"word": self._word})
        if self._rank == 0:
            return secret
        self._wait(self._is_called, lambda: "rank 0 has not called us")
        return own or Secret.from_file(self.path / "secret")

    def addresses(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """What all ranks say of themselves, in their order."""
        if self._rank:
            self._write(f"here.{self._rank}", {"word": self._word_of_first, "facts": facts})
            found: list[dict[str, Any]] = []

            def is_there() -> bool:
                table = self._read("table")
                if table is None or table["words"][self._rank] != self._word:
                    return False
                found.extend(table["facts"])
                return True

            self._wait(is_there, lambda: "rank 0 has not said where all others are")
            return found
        present: dict[int, dict[str, Any]] = {0: facts}
        called: dict[int, str] = {}

        def all_are_here() -> bool:
            hellos = {rank: self._read(f"hello.{rank}") for rank in range(self._size)}
            words = {rank: str(hello["word"]) for rank, hello in hellos.items() if hello is not None}
            if words != called:
                called.clear()
                called.update(words)
                self._write("roll", {"word": self._word, "words": {str(rank): each for rank, each in words.items()}})
            for rank in range(1, self._size):
                here = self._read(f"here.{rank}")
                if here is not None and here["word"] == self._word:
                    present[rank] = here["facts"]
            return len(present) == self._size

        self._wait(all_are_here, lambda: f"ranks {sorted(set(range(self._size)) - set(present))} have not come")
        ordered = [present[rank] for rank in range(self._size)]
        self._write("table", {"words": [called.get(rank) for rank in range(self._size)], "facts": ordered})
        return ordered

    def remove(self) -> None:
        """By rank 0, when the program is over."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _is_called(self) -> bool:
        roll = self._read("roll")
        if roll is None or roll["words"].get(str(self._rank)) != self._word:
            return False
        self._word_of_first = str(roll["word"])
        return True

    def _wait(self, holds: Callable[[], bool], missing: Callable[[], str]) -> None:
        deadline, pause = time.monotonic() + self._timeout, _PAUSE
        while not holds():
            if time.monotonic() > deadline:
                raise TransferTimeout(
                    f"rank {self._rank} of {self._size}: {missing()} within {self._timeout:g} s at {self.path}; all "
                    "hosts have to see that directory (option job_dir)",
                    operation="from_env",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _write(self, name: str, said: dict[str, Any]) -> None:
        draft = self.path / f"{name}.{secrets.token_hex(4)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(json.dumps(said).encode())
        os.replace(draft, self.path / name)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            said = json.loads((self.path / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return said if isinstance(said, dict) else None
