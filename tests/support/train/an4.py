"""A small corpus in the layout of AN4, packed or as files."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np

from oktopk.train.data.speech.audio import SAMPLE_RATE

Corpus = dict[str, bytes]


def sphere(samples: int, rate: int = SAMPLE_RATE, announced: int | None = None) -> bytes:
    head = (
        f"NIST_1A\n   1024\nsample_count -i {announced or samples}\nsample_rate -i {rate}\nsample_n_bytes -i 2\n"
        "sample_byte_format -s2 01\nchannel_count -i 1\nsample_coding -s3 pcm\nend_head\n"
    )
    return head.ljust(1024).encode() + (np.arange(samples) % 1000).astype("<i2").tobytes()


def small_corpus() -> Corpus:
    """Three good training utterances, one of them short, and one for validation that is just as short."""
    return {
        "an4/etc/an4_train.fileids": b"an4_clstk/f/a1-f\nan4_clstk/f/a2-f\nan4_clstk/m/a3-m\n",
        "an4/etc/an4_train.transcription": b"<s> YES </s> (a1-f)\n<s> U M SIX </s> (a2-f)\n<s> GO </s> (a3-m)\n",
        "an4/etc/an4_test.fileids": b"an4test_clstk/g/t1-g\n",
        "an4/etc/an4_test.transcription": b"ERASE C (t1-g)\n",
        "an4/wav/an4_clstk/f/a1-f.sph": sphere(16_000),
        "an4/wav/an4_clstk/f/a2-f.sph": sphere(20_000),
        "an4/wav/an4_clstk/m/a3-m.sph": sphere(15_999),
        "an4/wav/an4test_clstk/g/t1-g.sph": sphere(8000),
    }


def pack(corpus: Corpus, path: Path, mode: str = "w:xz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in corpus.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def unpack(corpus: Corpus, folder: Path) -> Path:
    for name, content in corpus.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
