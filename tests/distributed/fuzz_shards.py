"""Shards whose sounds and captions tell which sample of which shard they are, and damage done to them by chance.

A sound is a noise that its owner seeds, as 16-bit samples in a format without loss; its windows of 64 samples are
known. So of anything that comes out of a loader can be said whose sound and whose caption it is, or that it is
nobody's.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from clap_zero.audio.clips import FeatureConfig
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.logmel import decode_logmel, encode_logmel
from clap_zero.audio.waveform import to_int16

SAMPLES_PER_SHARD = 4
WINDOW = 64
EXACT_KINDS = (("FLAC", "PCM_16"), ("WAV", "PCM_16"), ("WAV", "FLOAT"), ("AIFF", "PCM_16"), ("CAF", "PCM_16"))
LOSSY_KINDS = (("OGG", "VORBIS"), ("MP3", None), ("WAV", "44100"))
CONFIG = FeatureConfig("rand_trunc")
_BLOCK = 512

Members = list[tuple[str, bytes]]


@dataclass(frozen=True)
class Owner:
    """A sample as it was made: number of its shard, key within it."""

    shard: int
    key: str

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.shard, *self.key.encode()])

    @property
    def samples(self) -> np.ndarray:
        """int16 (n,), nobody else's."""
        rng = self.rng
        return rng.integers(-20_000, 20_000, int(rng.integers(900, 3000))).astype(np.int16)

    @property
    def kind(self) -> tuple[str, str | None]:
        """Format and its variant, or rate. Some have a loss: of those only the caption tells whose they are."""
        draw = self.rng.random()
        if draw < 0.02:
            return "LOGMEL", None
        kinds = LOSSY_KINDS if draw < 0.1 else EXACT_KINDS
        return kinds[int(draw * 1000) % len(kinds)]

    def heard(self) -> np.ndarray:
        """As the loader gives it where nothing is damaged: int16 (n,), or (m, num_mels) of a log-mel."""
        if self.kind[0] == "LOGMEL":
            return decode_logmel(self.audio(), CONFIG).part(CONFIG, None, max_seconds=60.0)[0]
        return to_int16(self.samples / np.float32(32768))

    def audio(self) -> bytes:
        """The bytes of the file."""
        kind, subtype = self.kind
        if kind == "LOGMEL":
            return encode_logmel(self.samples / np.float32(32768), ClapFeatures(CONFIG, device="cpu"))
        samples, file = self.samples, io.BytesIO()
        if subtype == "FLOAT":  # soundfile would write integers as they are
            samples = samples / np.float32(32768)
        if kind == "WAV" and samples.size % 5 == 0:
            samples = np.stack([samples, samples], axis=1)
        rate_hz, subtype = (44_100, None) if subtype == "44100" else (48_000, subtype)
        soundfile.write(file, samples, rate_hz, format=kind, subtype=subtype)
        return file.getvalue()

    @property
    def caption(self) -> str:
        """Nobody else's."""
        return f"sound {self.key} of shard {self.shard}"

    def members(self) -> Members:
        """Audio and caption, which is a json or a txt."""
        if len(self.caption) % 3:
            text = ("json", json.dumps({"text": [self.caption]}).encode())
        else:
            text = ("txt", self.caption.encode())
        return [(f"{self.key}.{self.kind[0].lower()}", self.audio()), (f"{self.key}.{text[0]}", text[1])]


def owners(shard: int) -> list[Owner]:
    """The samples of a shard. The last key of each is the first of the next. One flipped bit makes no other key."""
    names = [f"{random.Random(shard * 31 + n).getrandbits(48):012x}" for n in range(SAMPLES_PER_SHARD - 2)]
    return [Owner(shard, key) for key in (f"edge{shard}", *names, f"edge{shard + 1}")]


def windows(heard: np.ndarray) -> list[int]:
    """Hashes of the windows of a sound, or of rows of a log-mel; whose they are is known where there is no loss."""
    if heard.ndim == 2:
        return [hash(row.tobytes()) for row in heard[:100:7]]
    return [hash(heard[start : start + WINDOW].tobytes()) for start in range(0, heard.size - WINDOW, WINDOW)]


def make_tar(members: Members, form: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


# Damage to any bytes.


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 10, 100))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice((0, 1, 10, 44, rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))]


def overwrite(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data) + 1), rng.choice((4, 512, 4096))
    filler = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    return data[:start] + filler[: max(0, len(data) - start)] + data[start + length :]


def remove(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data) + 1), rng.choice((1, 100, 512, 1024))
    return data[:start] + data[start + length :]


def repeat(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data) + 1), rng.choice((1, 512, 2048))
    return data[: start + length] + data[start:]


def head_fields(data: bytes, rng: random.Random) -> bytes:
    """Absurd numbers in the header: rates, channels, lengths."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 4))):
        at, width = rng.randrange(4, 64), rng.choice((1, 2, 4, 8))
        value = rng.choice((bytes(width), b"\xff" * width, b"\x7f" + b"\xff" * (width - 1), rng.randbytes(width)))
        changed[at : at + width] = value
    return bytes(changed[: len(data)])


ANY_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (flip_bits, cut, overwrite, remove, repeat)
AUDIO_DAMAGE = (*ANY_BYTES, head_fields, head_fields)


# Damage to the order and the headers of a tar.


def shuffled(members: Members, rng: random.Random) -> Members:
    return rng.sample(members, len(members))


def interleaved(members: Members, rng: random.Random) -> Members:
    return [*members[::2], *members[1::2]]


def doubled(members: Members, rng: random.Random) -> Members:
    """A later member has the name of an earlier one and what belongs to another."""
    position = rng.randrange(len(members) - 2)
    return [*members, (members[position][0], members[position + 2][1])]


def without_one(members: Members, rng: random.Random) -> Members:
    position = rng.randrange(len(members))
    return members[:position] + members[position + 1 :]


def with_junk(members: Members, rng: random.Random) -> Members:
    names = (
        "._x.wav",
        ".DS_Store",
        "__MACOSX/a.json",
        "a",
        "../../x.flac",
        "/abs.txt",
        "d/" * 40 + "x.wav",
        " .flac",
        ".flac",
    )
    position = rng.randrange(len(members) + 1)
    junk = (rng.choice(names), rng.randbytes(rng.choice((0, 700))))
    return [*members[:position], junk, *members[position:]]


ORDER_DAMAGE = (shuffled, interleaved, without_one, with_junk)


def absurd_header(data: bytes, rng: random.Random) -> bytes:
    """One header with another size, type or name and a checksum that is right again."""
    places = [at for at in range(0, len(data) - _BLOCK, _BLOCK) if data[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(places)
    block = bytearray(data[at : at + _BLOCK])
    change = rng.randrange(4)
    if change == 0:
        octal = rng.choice((b"77777777777\0", b"00000000000\0", b"-0000000001\0", b"\x80" + b"\0" * 3 + b"\x7f" * 8))
        block[124:136] = rng.choice((octal, b"\xff" * 12, b"\x80" + b"\0" * 10 + b"\1"))
    elif change == 1:
        block[156:157] = rng.choice((b"1", b"2", b"5", b"x", b"g", b"L", b"K", b"S", b"7", b"\0", b"\xff"))
    elif change == 2:
        block[:100] = rng.choice((bytes(100), b"\xff" * 100, b"a" * 100, rng.randbytes(100)))
    else:
        block[345:500] = rng.choice((b"p" * 155, rng.randbytes(155)))
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return data[:at] + bytes(block) + data[at + _BLOCK :]


def write_fuzzed(directory: Path, *, shards: int, audio_files: int, intact: int, seed: int = 0) -> list[int]:
    """Writes a split with damaged shards, shards with damaged audio files (two of four), and undamaged ones.

    Returns:
        The numbers of the undamaged shards.
    """
    rng = random.Random(seed)
    jobs = ["tar"] * shards + ["audio"] * (audio_files // 2) + ["none"] * intact
    rng.shuffle(jobs)
    directory.mkdir(parents=True)
    before = b""
    for number, job in enumerate(jobs):
        members = [member for owner in owners(number) for member in owner.members()]
        form = rng.choice((tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
        data = make_tar(members, form)
        if job == "audio":
            for place in rng.sample(range(0, len(members), 2), 2):
                members[place] = (members[place][0], rng.choice(AUDIO_DAMAGE)(members[place][1], rng))
            data = make_tar(members, form)
        elif job == "tar":
            data, before = damaged_tar(members, form, before, rng), data
        (directory / f"{number}.tar").write_bytes(data)
    (directory / "sizes.json").write_text(json.dumps({f"{n}.tar": SAMPLES_PER_SHARD for n in range(len(jobs))}))
    return [number for number, job in enumerate(jobs) if job == "none"]


def damaged_tar(members: Members, form: int, before: bytes, rng: random.Random) -> bytes:
    """A tar in another order, with one or two kinds of damage, or cut and followed by an earlier tar.

    The last is what a writer leaves that was killed and went on in the same file.
    """
    if rng.random() < 0.08:
        return make_tar(doubled(members, rng), form)  # alone: with the first one damaged, the tar itself would lie
    if before and rng.random() < 0.15:
        data = make_tar(members, form)
        return data[: rng.randrange(len(data) // _BLOCK) * _BLOCK] + before
    if rng.random() < 0.4:
        members = rng.choice(ORDER_DAMAGE)(members, rng)
    data = make_tar(members, form)
    for _ in range(rng.choice((0, 1, 1, 2)) if members else 1):
        if rng.random() < 0.3 and data[257:262] == b"ustar":
            data = absurd_header(data, rng)
        else:
            data = rng.choice(ANY_BYTES)(data, rng)
    return data
