"""monarch_rdma moves tensors between processes with one-sided reads and writes.

`monarch_rdma.rdma` holds the buffers, `monarch_rdma.sharding` layouts and plans, `monarch_rdma.kernels` what is
computed on tensors, `monarch_rdma.config` the options, `monarch_rdma.errors` the failures. They are imported when they
are first used; `import monarch_rdma` itself loads neither torch nor the C++ core.
"""

from __future__ import annotations

import importlib
from typing import Any

_SUBMODULES = ("config", "errors", "kernels", "rdma", "sharding")

__all__ = ["config", "errors", "kernels", "rdma", "sharding"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("monarch_rdma")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES, "__version__"])
