"""Tempo and gain: lengths, pitch, loudness, and the same again from the same generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.data.problems import DataError
from oktopk.train.data.speech.augment import Augment, change_gain, change_tempo

tempos = st.floats(0.85, 1.15)


def tone(hertz: float, seconds: float = 1.0) -> torch.Tensor:
    return 0.5 * torch.sin(2 * torch.pi * hertz * torch.arange(int(16_000 * seconds)) / 16_000)


@given(st.integers(0, 3000), tempos, st.integers(0, 2**32 - 1))
def test_the_length_follows_the_tempo(samples: int, tempo: float, seed: int) -> None:
    sound = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, samples)).float()
    changed = change_tempo(sound, tempo)
    assert len(changed) == round(samples / tempo)
    assert changed.dtype == torch.float32
    assert not samples or float(changed.abs().max()) <= 1.0 + 1e-5  # weights of overlapping pieces sum to one


@pytest.mark.parametrize("tempo", [0.85, 0.93, 1.07, 1.15])
@pytest.mark.parametrize("hertz", [80.0, 220.0, 1000.0, 3000.0])
def test_the_pitch_and_the_loudness_stay(hertz: float, tempo: float) -> None:
    """Resampling would move 1000 Hz to 850 or 1150, and careless overlap would cancel parts of the tone."""
    changed = change_tempo(tone(hertz), tempo)
    middle = changed[1000:-1000].numpy()
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle)), 1 << 16))
    assert abs(np.argmax(spectrum) * 16_000 / (1 << 16) - hertz) < 0.02 * hertz + 2
    assert abs(np.sqrt(np.mean(middle**2)) - 0.5 / np.sqrt(2)) < 0.03


@pytest.mark.parametrize("tempo", [0.85, 1.15])
def test_events_come_when_the_tempo_says(tempo: float) -> None:
    sound = torch.zeros(16_000)
    for at in (3000, 8000, 12_000):
        sound[at : at + 400] = tone(500.0)[:400]
    changed = change_tempo(sound, tempo)
    for at in (3000, 8000, 12_000):
        centre = round((at + 200) / tempo)
        assert float(changed[centre - 400 : centre + 400].square().sum()) > 0.5 * float(sound.square().sum()) / 3
    assert float(changed[: round(3000 / tempo) - 600].abs().max()) < 1e-6


def test_tempo_one_changes_nothing() -> None:
    sound = tone(300.0)
    assert torch.equal(change_tempo(sound, 1.0), sound)


@pytest.mark.parametrize("tempo", [0.0, -1.0, float("nan")])
def test_impossible_tempos(tempo: float) -> None:
    with pytest.raises(DataError, match="tempo must be positive"):
        change_tempo(tone(300.0), tempo)


@given(st.floats(-6, 8), st.floats(0.0, 1.0))
def test_gain_is_exact_until_it_would_clip(decibel: float, peak: float) -> None:
    sound = torch.tensor([peak, -peak / 2, 0.0])
    wanted = sound.double() * 10 ** (decibel / 20)
    changed = change_gain(sound, decibel)
    if float(wanted.abs().max()) <= 1:
        torch.testing.assert_close(changed.double(), wanted, rtol=1e-6, atol=1e-30)
    else:
        assert float(changed.abs().max()) == pytest.approx(1.0)
        torch.testing.assert_close(changed[1] / changed[0], torch.tensor(-0.5))


def test_the_same_generator_gives_the_same_sound_and_another_one_another() -> None:
    sound, augment = tone(200.0), Augment()
    first, again, other = (augment(sound, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert len(other) != len(first)


def test_draws_fill_their_ranges_and_stay_inside() -> None:
    generator = torch.Generator().manual_seed(0)
    sound = 0.1 * tone(200.0, 0.2)
    peak = float(sound.abs().max())
    made = [Augment()(sound, generator) for _ in range(200)]
    tempos = [len(sound) / len(one) for one in made]
    gains = [20 * np.log10(float(one.abs().max()) / peak) for one in made]
    assert 0.849 <= min(tempos) < 0.87
    assert 1.13 < max(tempos) <= 1.151
    assert -6.5 <= min(gains) < -5
    assert 7 < max(gains) <= 8.5


@pytest.mark.parametrize(
    ("tempo", "gain"), [((0.0, 1.0), (0.0, 0.0)), ((1.1, 0.9), (0.0, 0.0)), ((1.0, 1.0), (1.0, 0.0))]
)
def test_ranges_the_wrong_way_round(tempo: tuple[float, float], gain: tuple[float, float]) -> None:
    with pytest.raises(DataError, match="must be a range"):
        Augment(tempo, gain)
