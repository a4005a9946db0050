"""The secret of a job: where it comes from, and when it is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oktopk.utils.secret import new_secret, read_secret


def test_a_job_without_a_secret_has_none() -> None:
    assert read_secret({}) is None
    assert read_secret({"OKTOPK_REQUIRE_SECRET": "0"}) is None


def test_new_secrets_differ_and_are_accepted() -> None:
    secret = new_secret()
    assert read_secret({"OKTOPK_SECRET": secret, "OKTOPK_REQUIRE_SECRET": "1"}) == secret.encode()
    assert secret != new_secret()


def test_a_private_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("0123456789abcdef\n")
    assert read_secret({"OKTOPK_SECRET_FILE": str(path)}) == b"0123456789abcdef"
    assert read_secret({"OKTOPK_SECRET_FILE": str(path), "OKTOPK_SECRET": "x" * 20}) == b"x" * 20


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"OKTOPK_SECRET_FILE: .* has mode {mode:04o} .* chmod 600"):
        read_secret({"OKTOPK_SECRET_FILE": str(path)})


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name, why in (("pipe", "not a regular file"), ("folder", "not a regular file"), ("none", "cannot read")):
        with pytest.raises(ValueError, match=why):
            read_secret({"OKTOPK_SECRET_FILE": str(tmp_path / name)})


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"OKTOPK_SECRET": "short"}, "OKTOPK_SECRET: the secret has 5 bytes, expected at least 16"),
        ({"OKTOPK_SECRET": ""}, "the secret has 0 bytes"),
        ({"OKTOPK_REQUIRE_SECRET": "1"}, "there is no secret: set OKTOPK_SECRET or OKTOPK_SECRET_FILE"),
        ({"OKTOPK_REQUIRE_SECRET": "yes"}, "must be 0 or 1, got 'yes'"),
    ],
)
def test_mistakes_are_explained(environment: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_secret(environment)
