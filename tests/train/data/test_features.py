"""Features against plain NumPy, and sound files that are not what they should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from oktopk.train.data.problems import DataError
from oktopk.train.data.speech.audio import inspect, read_samples, read_sound, to_float, write_samples
from oktopk.train.data.speech.features import features, frame_count


def reference(sound: NDArray[np.float64]) -> NDArray[np.float64]:
    """Frame by frame, bin by bin, in double precision."""
    n = np.arange(320)
    window = 0.54 - 0.46 * np.cos(2 * np.pi * n / 319)
    fourier = np.exp(-2j * np.pi * np.outer(np.arange(161), n) / 320)
    padded = np.pad(sound, 160)
    columns = [
        np.log1p(np.abs(fourier @ (window * padded[at : at + 320]))) for at in range(0, len(padded) - 319, 160)
    ]
    loud = np.stack(columns, axis=1)
    return (loud - loud.mean()) / loud.std(ddof=1)


@pytest.mark.parametrize("samples", [2, 159, 160, 161, 319, 320, 321, 4801])
def test_features_equal_the_reference(samples: int) -> None:
    sound = np.random.default_rng(samples).uniform(-0.5, 0.5, samples)
    made = features(torch.from_numpy(sound).float())
    assert made.shape == (161, frame_count(samples))
    assert made.dtype == torch.float32
    np.testing.assert_allclose(made.numpy(), reference(sound), rtol=0, atol=2e-4)


@given(st.integers(320, 3000), st.floats(1e-3, 1.0), st.integers(0, 2**32 - 1))
def test_mean_zero_and_deviation_one_at_any_length_and_loudness(samples: int, loud: float, seed: int) -> None:
    sound = torch.from_numpy(np.random.default_rng(seed).standard_normal(samples)).float().mul_(loud)
    made = features(sound)
    assert made.shape == (161, frame_count(samples))
    assert abs(float(made.mean())) < 1e-3
    assert abs(float(made.std()) - 1) < 1e-3


def test_a_tone_is_in_its_bin() -> None:
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(16_000) / 16_000)
    assert set(features(tone)[:, 5:-5].argmax(dim=0).tolist()) == {20}  # 50 Hz a bin


@pytest.mark.parametrize("sound", [torch.zeros(1600), torch.tensor([0.3])], ids=["silence", "one sample"])
def test_what_has_no_spread_gives_zeros(sound: torch.Tensor) -> None:
    assert torch.equal(features(sound), torch.zeros(161, frame_count(len(sound))))


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        (torch.zeros(0), r"a\.wav: no samples"),
        (torch.zeros(100, 2), r"a\.wav: expected one channel, got a tensor of shape \[100, 2\]"),
        (torch.tensor([0.0, float("nan")]), r"a\.wav: contains non-finite samples"),
        (torch.tensor([0.0, float("inf")]), r"a\.wav: contains non-finite samples"),
    ],
)
def test_tensors_that_are_no_sound(sound: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        features(sound, "a.wav")


def test_samples_come_back_from_a_wav_file(tmp_path: Path) -> None:
    samples = np.array([0, 1, -1, 32767, -32768, 12345], dtype=np.int16)
    write_samples(tmp_path / "sub" / "a.wav", samples)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["a.wav"]
    np.testing.assert_array_equal(read_samples(tmp_path / "sub" / "a.wav"), samples)
    sound = read_sound(tmp_path / "sub" / "a.wav")
    assert torch.equal(sound, to_float(samples))
    assert sound.tolist() == (samples / 32768).tolist()
    assert inspect(tmp_path / "sub" / "a.wav").seconds == 6 / 16_000


def sphere(path: Path, samples: NDArray[np.int16], announced: int | None = None) -> Path:
    head = (
        f"NIST_1A\n   1024\nsample_count -i {len(samples) if announced is None else announced}\n"
        "sample_rate -i 16000\nsample_n_bytes -i 2\nsample_byte_format -s2 01\nchannel_count -i 1\n"
        "sample_coding -s3 pcm\nend_head\n"
    )
    path.write_bytes(head.ljust(1024).encode() + samples.astype("<i2").tobytes())
    return path


def test_sphere_files_are_read(tmp_path: Path) -> None:
    samples = np.arange(-500, 500, dtype=np.int16)
    np.testing.assert_array_equal(read_samples(sphere(tmp_path / "a.sph", samples)), samples)


def test_a_sphere_file_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.sph: truncated after 700 of 1000 samples"):
        read_samples(sphere(tmp_path / "a.sph", np.zeros(700, np.int16), announced=1000))


def write(path: Path, samples: NDArray[np.float64], rate: int = 16_000, subtype: str = "PCM_16") -> None:
    soundfile.write(str(path), samples, rate, subtype=subtype)


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    write(tmp_path / "slow.wav", np.zeros(100), rate=8000)
    write(tmp_path / "stereo.wav", np.zeros((100, 2)))
    write(tmp_path / "nothing.wav", np.zeros(0))
    write(tmp_path / "nan.wav", np.array([0.0, np.nan]), subtype="FLOAT")
    (tmp_path / "text.wav").write_text("HELLO WORLD\n" * 100)
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "noise.wav").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "folder.wav").mkdir()
    expected = {
        "slow.wav": "8000 Hz instead of 16000",
        "stereo.wav": "2 channels instead of 1",
        "nothing.wav": "no samples",
        "nan.wav": "non-finite",
        "text.wav": "text, not sound",
        "empty.wav": "the file is empty",
        "noise.wav": "not a readable sound file",
        "folder.wav": "Is a directory",
        "gone.wav": "No such file",
    }
    for name, message in expected.items():
        with pytest.raises(DataError, match=rf"{name}: .*{message}|{name}: {message}"):
            read_sound(tmp_path / name)
