"""What the tests of the launcher let workers run: the source text in the payload."""

from __future__ import annotations

from typing import Any


def run(payload: bytes, fds: list[int]) -> Any:
    """Executes the payload with `fds`; what it assigns to `result` becomes the exit code."""
    names: dict[str, Any] = {"fds": fds}
    exec(payload.decode(), names)
    return names.get("result")
