"""setuptools' build backend, building against the torch of the environment that is being installed into.

pip builds in an isolated environment that hides the installed torch. Asking for `torch` there would fetch a second one,
often gigabytes, and build against that. Only where the target has none is torch asked for.
$MONARCH_RDMA_BUILD_TORCH names the requirement to build against instead, e.g. "torch==2.13.0".
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (part of the backend interface)
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

Settings = dict[str, Any] | None


def _requested() -> str | None:
    return os.environ.get("MONARCH_RDMA_BUILD_TORCH")


def _target_site_packages() -> str | None:
    """site-packages of the interpreter that runs pip, if torch is in it; isolation hides it but does not rename it."""
    for kind in ("purelib", "platlib"):
        path = sysconfig.get_path(kind)
        if path and (Path(path) / "torch" / "version.py").is_file():
            return path
    return None


def _show_torch() -> None:
    path = None if _requested() else _target_site_packages()
    if path and path not in sys.path:
        sys.path.append(path)  # last: the isolated setuptools and cffi come first


def _torch_requirement() -> list[str]:
    if _requested():
        return [str(_requested())]
    return [] if _target_site_packages() else ["torch>=2.10"]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    _show_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _show_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
