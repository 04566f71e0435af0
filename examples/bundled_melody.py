"""The bundled recording, `src/clipaware/data/melody.flac`: plucked strings, computed. Run it to make the file again.

python examples/bundled_melody.py melody.flac
"""

from __future__ import annotations

import sys

import numpy as np
import soundfile

RATE = 16000
BEAT = 0.3  # seconds
SOUNDING = 2.4  # seconds for which a string is heard
# Semitones above A3, beat by beat: broken chords of A minor, F, C and G, and home again.
NOTES = (0, 7, 12, 15, -4, 3, 8, 12, 3, 10, 15, 19, -2, 5, 10, 14, 0, 7, 12, 24)


def pluck(frequency: float, rng: np.random.Generator) -> np.ndarray:
    """A string by Karplus and Strong: noise that goes round in a loop, averaged with its neighbour every time."""
    period = round(RATE / frequency)
    loop = rng.uniform(-1, 1, period)
    loop -= loop.mean()
    rounds = []
    for _ in range(int(SOUNDING * RATE / period) + 1):
        rounds.append(loop)
        loop = 0.499 * (loop + np.roll(loop, 1))
    return np.concatenate(rounds)[: int(SOUNDING * RATE)]


def melody() -> np.ndarray:
    """All notes, compressed and as loud as 16 bits allow, as records are."""
    rng = np.random.default_rng(0)
    sound = np.zeros(int((BEAT * len(NOTES) + SOUNDING) * RATE))
    for beat, note in enumerate(NOTES):
        start = int(beat * BEAT * RATE)
        string = pluck(220 * 2 ** (note / 12), rng)
        sound[start : start + len(string)] += string
    sound = np.tanh(5 * sound / abs(sound).max())
    sound *= np.minimum(1, np.arange(len(sound))[::-1] / (0.5 * RATE))  # a soft end
    return np.rint(32767 * sound / abs(sound).max()).astype(np.int16)


if __name__ == "__main__":
    soundfile.write(sys.argv[1] if len(sys.argv) > 1 else "melody.flac", melody(), RATE, subtype="PCM_16")
