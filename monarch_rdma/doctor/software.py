"""What is installed: Python, torch, OpenSSL, and this package's own parts."""

from __future__ import annotations

import platform
import ssl
import sys
from importlib import metadata

from .. import config
from ..errors import ConfigError
from .check import Check

__all__ = ["checks"]


def checks() -> list[Check]:
    """All of this module, in the order in which they are shown."""
    return [_python(), _torch(), _tls(), _core(), _options()]


def _python() -> Check:
    why = f"{platform.python_implementation()} {platform.python_version()}; 3.10 or newer is needed"
    return Check("software", "Python", sys.version_info >= (3, 10), why, "apt-get install python3.12")


def _torch() -> Check:
    """Its version, without the seconds that importing it takes."""
    fix = "pip install 'torch>=2.10'"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("software", "torch", False, "not installed; memoryviews and arrays can be moved without it", fix)
    new_enough = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= (2, 10)
    return Check("software", "torch", new_enough, f"{version}; 2.10 or newer is needed", fix)


def _tls() -> Check:
    why = f"{ssl.OPENSSL_VERSION}, TLS 1.3 {'yes' if ssl.HAS_TLSv1_3 else 'no'}"
    ok = ssl.HAS_TLSv1_3 and ssl.OPENSSL_VERSION_INFO >= (3, 0)
    return Check("software", "OpenSSL", ok, why, "apt-get install libssl3")


def _core() -> Check:
    try:
        from .._engine import ffi, lib

        why = f"version {ffi.string(lib.mr_version()).decode()}, protocol {lib.mr_protocol_version()}"
    except ImportError as error:
        return Check("software", "C++ core", False, f"it cannot be loaded: {error}", "make build", required=True)
    return Check("software", "C++ core", True, why, required=True)


def _options() -> Check:
    """Those in the environment, which every engine refuses to start with where one is wrong."""
    try:
        config.engine_options()
    except ConfigError as error:
        return Check("software", "options", False, str(error), "set it right, or unset it", required=True)
    return Check("software", "options", True, "what the environment sets of them can be used", required=True)
