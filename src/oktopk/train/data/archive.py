"""Read tar archives from elsewhere, which may be made to take any amount of time and disk."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from oktopk.utils.files import open_regular

from .problems import DataError

_OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open, b"]\x00\x00": lzma.open}
_CHUNK_BYTES = 2**20
_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENDED = (*_PAX, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_LARGEST_HEADER, _MOST_GLOBAL = 2**16, 100


@dataclass(frozen=True)
class Limits:
    """How much an archive may hold.

    Attributes:
        file_bytes: Size of one file; larger ones are left out.
        total_bytes: Size of the unpacked archive.
        headers: Number of members, and of their extended headers.
        ratio: Unpacked size over the size of the archive. AN4 and CIFAR-10 have less than 10.
        small_bytes: Unpacked size up to which the ratio does not matter.
    """

    file_bytes: int
    total_bytes: int
    headers: int
    ratio: int = 100
    small_bytes: int = 2**24


@dataclass(frozen=True)
class Member:
    """A member of an archive other than a folder; `content` is None unless it is a regular file within limits."""

    name: str
    content: bytes | None


def read_members(source: Path, limits: Limits, endings: tuple[str, ...]) -> Iterator[Member]:
    """Read the members whose name has one of these endings, in one pass and without unpacking anything.

    Args:
        source: A tar archive, plain or compressed by gzip, bzip2 or xz.
        limits: What ends the reading with a DataError.
        endings: Endings in lower case.

    Raises:
        DataError: The archive is damaged, incomplete, or exceeds a limit.
    """
    try:
        with ExitStack() as files:
            stream = _Stream(source, limits, files)
            archive = files.enter_context(tarfile.open(fileobj=cast(Any, stream), mode="r:", tarinfo=_Header))
            for member in archive:
                if member.isdir() or not member.name.lower().endswith(endings):
                    continue
                plain = member.isreg() and not member.issparse() and member.size <= limits.file_bytes
                content = archive.extractfile(member) if plain else None
                yield Member(member.name, None if content is None else content.read())
            # tarfile takes a truncated or missing header for the end; a real end is a block of zeros.
            if stream.tell() < archive.offset + tarfile.BLOCKSIZE:
                raise tarfile.ReadError("truncated")
    except (DataError, MemoryError):
        raise
    except Exception as error:  # a crafted file can raise almost anything
        raise DataError(f"{source}: incomplete or damaged tar archive: {error}") from error


class _Stream:
    """The unpacked bytes of an archive, read forward only and up to the limit.

    tarfile's own reader of streams ("r|xz") keeps what a block of 10 kB expands to in one string and copies it for
    every 512 bytes: a minute for each 100 MB of zeros.
    """

    def __init__(self, source: Path, limits: Limits, files: ExitStack) -> None:
        raw = files.enter_context(open_regular(source))
        start, self._size = raw.read(6), raw.seek(0, 2)
        raw.seek(0)
        opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
        self._file: BinaryIO = raw if opener is None else files.enter_context(cast(Any, opener)(raw))
        self._source, self._limits, self._place, self._headers = source, limits, 0, 0
        self._most = min(limits.total_bytes, max(limits.small_bytes, limits.ratio * self._size))

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        while self._place < place and self.read(min(_CHUNK_BYTES, place - self._place)):
            pass
        if self._place > place:
            raise tarfile.StreamError("seeking backwards")

    def read(self, size: int) -> bytes:
        content = self._file.read(min(size, self._most - self._place + 1))
        self._place += len(content)
        if self._place > self._most:
            limits = self._limits
            raise DataError(
                f"{self._source}: its {self._size:,} bytes expand to more than {self._most:,}; the limit is "
                f"{limits.ratio} times its size (at least {limits.small_bytes:,}, at most {limits.total_bytes:,})"
            )
        return content

    def count_header(self, global_keys: int) -> None:
        self._headers += 1
        if self._headers > self._limits.headers:
            raise DataError(f"{self._source}: more than {self._limits.headers:,} members, which is the limit")
        if global_keys > _MOST_GLOBAL:  # every member gets a copy of them
            raise DataError(f"{self._source}: more than {_MOST_GLOBAL} global header fields, which is the limit")


class _Header(tarfile.TarInfo):
    """A header that is counted, and whose extension is of a sensible size: tarfile parses it in memory."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _Header:
        cast(_Stream, tarfile.fileobj).count_header(len(tarfile.pax_headers))
        return super().fromtarfile(tarfile)

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _EXTENDED and header.size > _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {header.size:,} bytes; the limit is {_LARGEST_HEADER:,}")
        return header
