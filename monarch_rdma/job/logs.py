"""What the agents and the client of a job have printed, wherever that is: in files here, or behind a command."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from ..errors import ConfigError

__all__ = ["CommandLog", "FileLogs", "Log"]

_ENDING = 30.0  # seconds for a command to print the rest
_CLOSING = 5.0  # seconds for it to notice that nobody reads on


class Log(Protocol):
    """One or several, read bit by bit. `problem`: why no more can be read, if it cannot."""

    problem: str

    def read(self, *, to_its_end: bool) -> list[str]:
        """The lines that are new, each with the name of its log in front; `to_its_end`: waits for the rest."""

    def close(self) -> None:
        """Ends what follows it."""


class FileLogs:
    """The files `*.log` of a directory, those too that come later."""

    problem = ""

    def __init__(self, directory: Path, job: str) -> None:
        """ConfigError where the directory is not there."""
        if not directory.is_dir():
            raise ConfigError(f"{job} has no logs on this host: there is no directory {str(directory)!r}")
        self._directory = directory
        self._places: dict[Path, int] = {}

    def read(self, *, to_its_end: bool) -> list[str]:
        """See Log."""
        paths = sorted(self._directory.glob("*.log"))
        return [line for path in paths for line in self._lines_of(path, to_its_end)]

    def _lines_of(self, path: Path, to_its_end: bool) -> list[str]:
        """Whole ones, unless no more will come."""
        place = self._places.get(path, 0)
        with open(path, "rb") as file:
            file.seek(place)
            data = file.read()
        whole = len(data) if to_its_end else data.rfind(b"\n") + 1
        self._places[path] = place + whole
        return [f"[{path.stem}] {line}" for line in data[:whole].decode("utf-8", "replace").splitlines()]

    def close(self) -> None:
        """Nothing follows it."""


class CommandLog:
    """What a command prints. It has to end when its standard input does."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.problem = ""
        self._name = name
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._errors: list[str] = []
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_out, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            self._lines.put(f"[{self._name}] {line.rstrip()}")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None, "it is a pipe"
        self._errors += [line.strip() for line in self._process.stderr]

    def read(self, *, to_its_end: bool) -> list[str]:
        """See Log."""
        if to_its_end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING)
        if self._process.poll() is not None:
            for reader in self._readers:
                reader.join()
            if self._process.returncode:
                self.problem = "; ".join(self._errors) or f"exit code {self._process.returncode}"
        return [self._lines.get() for _ in range(self._lines.qsize())]

    def close(self) -> None:
        """See Log."""
        process = self._process
        assert process.stdin and process.stdout and process.stderr, "all are pipes"
        process.stdin.close()
        try:
            process.wait(_CLOSING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()
