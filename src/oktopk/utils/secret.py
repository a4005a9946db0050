"""The secret that the ranks of a job share. It comes from the environment, never from the job's store."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping

SECRET, SECRET_FILE, REQUIRE_SECRET = "OKTOPK_SECRET", "OKTOPK_SECRET_FILE", "OKTOPK_REQUIRE_SECRET"
_SHORTEST, _LONGEST = 16, 4096
"""Bytes. A short secret could be guessed by whoever records a handshake."""


def new_secret() -> str:
    """A random secret, for a job that this process starts."""
    return secrets.token_hex(32)


def read_secret(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The job's secret: OKTOPK_SECRET, or the contents of OKTOPK_SECRET_FILE; None if neither is set.

    Args:
        environment: Where to look for the variables.

    Raises:
        ValueError: The secret is too short, the file cannot be read or is readable by others, or there is no
            secret although OKTOPK_REQUIRE_SECRET is 1.
    """
    required = environment.get(REQUIRE_SECRET, "0")
    if required not in ("0", "1"):
        raise ValueError(f"{REQUIRE_SECRET} must be 0 or 1, got {required!r}")
    if SECRET in environment:
        return _checked(environment[SECRET].encode(errors="surrogateescape"), SECRET)
    if SECRET_FILE in environment:
        return _checked(_read_private(environment[SECRET_FILE]), SECRET_FILE)
    if required == "1":
        raise ValueError(f"{REQUIRE_SECRET} is 1, but there is no secret: set {SECRET} or {SECRET_FILE}")
    return None


def is_required(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether messages must not travel over connections that no secret protects."""
    return environment.get(REQUIRE_SECRET) == "1"


def _checked(secret: bytes, name: str) -> bytes:
    secret = secret.strip()
    if len(secret) < _SHORTEST:
        raise ValueError(f"{name}: the secret has {len(secret)} bytes, expected at least {_SHORTEST}")
    return secret


def _read_private(path: str) -> bytes:
    """The contents of a file that nobody else can read or write."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for the writer of a pipe
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{SECRET_FILE}: {path} is not a regular file")
            if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
                raise ValueError(
                    f"{SECRET_FILE}: {path} has mode {status.st_mode & 0o777:04o} and owner {status.st_uid}: "
                    f"others may read it; it must be yours alone: chmod 600 {path}"
                )
            return os.read(file, _LONGEST)
        finally:
            os.close(file)
    except OSError as error:
        raise ValueError(f"{SECRET_FILE}: cannot read {path}: {error.strerror}") from error
