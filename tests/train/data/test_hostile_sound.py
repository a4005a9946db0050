"""Sound files that are cut, lie about themselves or are none: samples that are finite, or a DataError."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from oktopk.train.data.problems import DataError
from oktopk.train.data.speech import audio
from oktopk.train.data.speech.audio import SAMPLE_RATE, inspect, read_samples, read_sound

KINDS = {
    "wav": "PCM_16",
    "floats.wav": "FLOAT",
    "flac": "PCM_16",
    "ogg": "VORBIS",
    "aiff": "PCM_16",
    "au": "PCM_16",
}
EXTREMES = (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A real file of each kind, and one of NIST's."""
    folder = tmp_path_factory.mktemp("sounds")
    wave = 0.5 * np.sin(np.arange(1600) / 9)
    found = {}
    for kind, subtype in KINDS.items():
        path = folder / f"a.{kind}"
        soundfile.write(str(path), wave, SAMPLE_RATE, subtype=subtype)
        found[kind] = path.read_bytes()
    head = "NIST_1A\n   1024\nsample_count -i 1600\nsample_rate -i 16000\nsample_n_bytes -i 2\n"
    head += "sample_byte_format -s2 01\nchannel_count -i 1\nsample_coding -s3 pcm\nend_head\n"
    return {**found, "sph": head.ljust(1024).encode() + (wave * 2**15).astype("<i2").tobytes()}


def assert_sound_or_error(path: Path, content: bytes) -> bool:
    """Whether it was read."""
    path.write_bytes(content)
    said = ""
    try:
        sound = read_sound(path)
        read_samples(path)
    except DataError as error:
        said = str(error)
    if said:
        assert said.startswith(f"{path}: ")
        return False
    assert bool(sound.isfinite().all())
    assert 0 < sound.numel() <= audio.LONGEST_SECONDS * SAMPLE_RATE
    return True


@pytest.mark.parametrize("kind", [*KINDS, "sph"])
def test_a_real_one_is_read(tmp_path: Path, sounds: dict[str, bytes], kind: str) -> None:
    assert assert_sound_or_error(tmp_path / f"a.{kind}", sounds[kind])


@pytest.mark.parametrize("kind", [*KINDS, "sph"])
def test_cut_anywhere(tmp_path: Path, sounds: dict[str, bytes], kind: str) -> None:
    whole = sounds[kind]
    for length in {*range(0, min(len(whole), 128), 3), *range(0, len(whole), len(whole) // 24)}:
        assert_sound_or_error(tmp_path / f"a.{kind}", whole[:length])


@pytest.mark.parametrize("kind", [*KINDS, "sph"])
def test_damaged_anywhere(tmp_path: Path, sounds: dict[str, bytes], kind: str) -> None:
    """Bytes changed, mostly in the head."""
    random = np.random.default_rng(len(kind))
    for _ in range(150):
        content = bytearray(sounds[kind])
        for _ in range(random.integers(1, 5)):
            reach = 80 if random.random() < 0.8 else len(content)
            content[random.integers(reach)] = random.integers(256)
        assert_sound_or_error(tmp_path / f"a.{kind}", bytes(content))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [*KINDS, "sph"])
def test_any_number_in_the_head_is_extreme(
    tmp_path: Path, sounds: dict[str, bytes], kind: str, order: str
) -> None:
    for at in range(0, 60, 2):
        for value in EXTREMES:
            content = bytearray(sounds[kind])
            content[at : at + 4] = np.array(value).astype(f"{order}u4").tobytes()
            assert_sound_or_error(tmp_path / f"a.{kind}", bytes(content))


def test_a_head_that_announces_hours_gets_no_room_for_them(tmp_path: Path, sounds: dict[str, bytes]) -> None:
    """A flac file says how many samples it has in 36 bits."""
    content = bytearray(sounds["flac"])
    assert int.from_bytes(content[21:26], "big") & 2**36 - 1 == 1600
    content[21] |= 0x0F
    content[22:26] = b"\xff" * 4
    path = tmp_path / "long.flac"
    path.write_bytes(content)
    for read in (inspect, read_sound, read_samples):
        with pytest.raises(DataError, match=r"long\.flac: lasts 4\.295e\+06 seconds by its header; the limit"):
            read(path)


def test_numbers_that_no_int_holds(tmp_path: Path, sounds: dict[str, bytes]) -> None:
    lie = sounds["sph"].replace(b"sample_count -i 1600", b"sample_count -i " + b"9" * 400)
    assert not assert_sound_or_error(tmp_path / "a.sph", lie[:1024] + sounds["sph"][1024:])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE"])
def test_samples_that_are_no_numbers(tmp_path: Path, bad: float, subtype: str) -> None:
    soundfile.write(str(tmp_path / "a.wav"), np.array([0.0, bad, 0.5]), SAMPLE_RATE, subtype=subtype)
    with pytest.raises(DataError, match="non-finite"):
        read_sound(tmp_path / "a.wav")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "zeros.wav").symlink_to("/dev/zero")
    for name in ("pipe.wav", "zeros.wav"):
        with pytest.raises(DataError, match=rf"{name}: not a regular file"):
            read_sound(tmp_path / name)
