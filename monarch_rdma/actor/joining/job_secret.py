"""Who may take part: whoever knows the job secret. How it is given to what runs on several hosts."""

from __future__ import annotations

import os
import warnings
from typing import Any

from ...errors import ConfigError
from ...rdma.engine import Engine, default_engine_with
from ...rdma.secret import Secret, configured_secret
from ..runtime.proc import existing_proc

__all__ = ["check_ca", "engine_of_job", "job_secret"]

TRUST_ALL = "trust_all_connections"  # what Monarch's programs have to pass
_HOW_TO = (
    "give all hosts of the job the same secret file, in option secret_file (environment variable "
    "MONARCH_RDMA_SECRET_FILE) or as private_key=pathlib.Path(...); this makes one: "
    "python -c \"from monarch_rdma.rdma import Secret; Secret.generate().write_file('job.secret')\""
)
_has_warned = False


def check_ca(ca: Any) -> None:
    """Monarch's argument. It changes nothing here; ConfigError where that would be a surprise."""
    global _has_warned
    if ca is None:
        return
    if ca != TRUST_ALL:
        raise ConfigError(
            f"ca is a {type(ca).__name__}, but certificates are not used here: the job secret decides who may connect, "
            f"and encrypts what goes between hosts; leave ca out, and {_HOW_TO}"
        )
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"ca={TRUST_ALL!r} is ignored: the job secret decides who may connect, and others are refused",
            UserWarning,
            stacklevel=3,  # who calls the function that has this argument
        )


def job_secret(private_key: bytes | os.PathLike[str] | None) -> Secret:
    """The argument (the secret itself, or the path of its file), or the one that this process has. ConfigError."""
    configured = configured_secret() or _given_before()
    if private_key is None:
        if configured is None:
            raise ConfigError(f"there is no job secret, so nobody could be told from a stranger: {_HOW_TO}")
        return configured
    if isinstance(private_key, bytes):
        given = Secret(private_key)
    elif isinstance(private_key, os.PathLike):
        given = Secret.from_file(private_key)
    else:
        raise ConfigError(
            f"private_key is a {type(private_key).__name__}, but must be the job secret's bytes, or the pathlib.Path "
            "of its file"
        )
    if configured not in (None, given):
        raise ConfigError(
            "private_key is not the job secret that this process has been given already, there or in an option"
        )
    return given


def _given_before() -> Secret | None:
    """By an earlier call, or by the agent that started this process."""
    proc = existing_proc()
    return proc.engine.secret if proc is not None and not proc.engine.secret_is_random else None


def engine_of_job(secret: Secret) -> Engine:
    """This process's engine, made with this secret. ConfigError where it was made with another one."""
    engine = default_engine_with(secret)
    if engine is None:
        raise ConfigError(
            "this process has begun with another job secret, or with none; give it the job's before anything else, as "
            "option secret_file (environment variable MONARCH_RDMA_SECRET_FILE)"
        )
    return engine
