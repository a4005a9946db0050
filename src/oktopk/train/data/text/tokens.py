"""Text as one stream of tokens, for models that predict the next one: characters of a text file, or token files.

A data folder holds one of

    train.bin, val.bin       tokens as little-endian uint16, as written by most GPT preparation scripts; the
                             vocabulary is that of GPT-2, or the larger number in vocab_size.txt
    input.txt or another single .txt file      characters; the first 90 % train, the rest validates
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oktopk.utils.files import open_regular

from ..problems import DataError
from .synthetic import embedded_prose

GPT2_VOCABULARY = 50_257
TRAIN_SHARE = 0.9


@dataclass(frozen=True)
class TokenText:
    """Training and validation tokens, and how many different ones there are."""

    train: Tensor  # [tokens], int64
    valid: Tensor
    vocabulary: int
    kind: str
    """What a token is: "characters" or "tokens"."""


def read_tokens(folder: Path) -> TokenText:
    """Read token files, or the characters of the folder's only text file."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    if (folder / "train.bin").exists():
        return _read_token_files(folder)
    found = [folder / "input.txt"] if (folder / "input.txt").exists() else sorted(folder.glob("*.txt"))
    candidates = [path for path in found if not path.name.endswith("-vocab.txt")]
    if len(candidates) != 1:
        names = ", ".join(path.name for path in candidates) or "none"
        raise DataError(f"{folder}: expected train.bin and val.bin, input.txt, or one .txt file; found {names}")
    return encode_characters(_read(candidates[0]), str(candidates[0]))


def embedded_tokens() -> TokenText:
    """The characters of generated prose, always the same."""
    prose = embedded_prose()
    text = "\n\n".join("\n".join(document) for document in (*prose.train, *prose.valid))
    return encode_characters(text, "generated text")


def encode_characters(text: str, name: str) -> TokenText:
    """Number the characters of a text in their order; the first 90 % train.

    >>> encode_characters("abababababababababac", "example").valid.tolist()
    [0, 2]
    """
    letters, numbers = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), return_inverse=True)
    if len(letters) < 2:
        raise DataError(f"{name}: a text of at least two different characters is needed")
    stream = torch.from_numpy(numbers.astype(np.int64))
    cut = int(TRAIN_SHARE * len(stream))
    return TokenText(stream[:cut], stream[cut:], len(letters), "characters")


def _read(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_token_files(folder: Path) -> TokenText:
    train, valid = (_read_numbers(folder / name) for name in ("train.bin", "val.bin"))
    vocabulary = GPT2_VOCABULARY
    if (folder / "vocab_size.txt").exists():
        written = _read(folder / "vocab_size.txt").strip()
        if not re.fullmatch("[0-9]{1,6}", written) or not 2 <= int(written) <= 2**16:
            raise DataError(
                f"{folder / 'vocab_size.txt'}: expected a number from 2 to 65536, found {written[:40]!r}"
            )
        vocabulary = int(written)
    highest = max(int(part.max()) for part in (train, valid))
    if highest >= vocabulary:
        raise DataError(
            f"{folder}: token {highest} is outside the vocabulary of {vocabulary}: write the right size to "
            "vocab_size.txt"
        )
    return TokenText(train, valid, vocabulary, "tokens")


def _read_numbers(path: Path) -> Tensor:
    try:
        with open_regular(path) as file:
            numbers = np.fromfile(file, dtype="<u2")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not numbers.size:
        raise DataError(f"{path}: no tokens")
    return torch.from_numpy(numbers.astype(np.int64))


@dataclass(frozen=True)
class Windows:
    """A stream cut into windows of `context` tokens, each with the next token of every position.

    Every epoch begins at another offset, so that windows are cut elsewhere each time:

        tokens      0 1 2 3 4 5 6 7 8 9          context 3
        offset 0    └───┘ └───┘ └───┘
        offset 2        └───┘ └───┘              the targets of 2 3 4 are 3 4 5
    """

    stream: Tensor  # [tokens]
    context: int

    def __len__(self) -> int:
        """Windows that every offset has."""
        return max(0, (len(self.stream) - self.context) // self.context)

    def batch(self, numbers: list[int], offset: int = 0) -> tuple[Tensor, Tensor]:
        """(tokens, targets), each [windows, context]."""
        starts = torch.tensor(numbers)[:, None] * self.context + offset
        places = starts + torch.arange(self.context)
        return self.stream[places], self.stream[places + 1]
