"""Which files all processes of a program have opened, as opening/sitecustomize.py writes them down."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OpenedFiles"]

_HOOK = Path(__file__).resolve().parent / "opening"
_NO_FILES = ("/proc/", "/sys/", "/dev/")


@dataclass
class OpenedFiles:
    """`environment` is for the program's; look at the rest when it has ended."""

    log: Path

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(_HOOK), os.environ.get("PYTHONPATH"))))
        return {"OPENED_FILES": str(self.log), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def _lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    @property
    def processes(self) -> set[int]:
        return {int(str(line["pid"])) for line in self._lines()}

    def _paths(self, writes: bool, by: int | None = None) -> set[Path]:
        lines = [line for line in self._lines() if line["path"] and line["writes"] == writes]
        paths = {str(line["path"]) for line in lines if by in (None, line["pid"])}
        return {Path(path) for path in paths if not path.startswith(_NO_FILES)}

    def written(self, *, by: int | None = None) -> set[Path]:
        """Opened so that they may be changed, whatever became of them. `by`: this process alone."""
        return self._paths(writes=True, by=by)

    def read_since(self, moment: float) -> set[Path]:
        """Regular files that were read, and are of after that moment (their inode has changed; time.time())."""
        found = set()
        for path in self._paths(writes=False):
            try:
                status = path.stat()
            except OSError:  # it was looked for, or was written and is gone: then it is among those written
                continue
            if stat.S_ISREG(status.st_mode) and status.st_ctime > moment:
                found.add(path)
        return found
