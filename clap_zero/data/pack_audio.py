"""One item to the bytes that a shard holds: FLAC (48 kHz, mono, 16 bit) or the stored log-mel. Runs in workers."""

from __future__ import annotations

import functools
import io
from dataclasses import replace

import soundfile

from clap_zero.audio.clips import FeatureConfig
from clap_zero.audio.decode import AudioError, load_clip
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.logmel import encode_logmel, to_pcm16
from clap_zero.data.members import BadSampleError
from clap_zero.data.pack_encoding import SAMPLE_RATE_HZ, Encoded, Encoding, Truncation, unexpected
from clap_zero.data.pack_files import read_file
from clap_zero.data.pack_items import Item
from clap_zero.data.pack_sidecars import read_sidecars
from clap_zero.data.samples import MAX_MEMBER_BYTES


def encode(item: Item, encoding: Encoding) -> Encoded:
    """Reads, decodes and encodes one item; what is wrong with it becomes its reason.

    Args:
        item: what to pack.
        encoding: how.
    """
    try:
        return _encode(item, encoding)
    except (AudioError, BadSampleError) as error:
        return Encoded(item.without_bytes(), reason=str(error))
    except Exception as error:  # noqa: BLE001  one clip of millions: the parent counts these
        return unexpected(item, error)


def _encode(item: Item, encoding: Encoding) -> Encoded:
    if item.reason is not None:
        return Encoded(item.without_bytes(), reason=item.reason)
    item = read_sidecars(item)
    data = item.audio if item.audio is not None else read_file(item.path, max_bytes=MAX_MEMBER_BYTES)
    # A little more than is kept tells whether there was more.
    notes: list[str] = []
    most = encoding.max_seconds + 0.01
    samples = load_clip(data, max_seconds=most, sample_rate_hz=SAMPLE_RATE_HZ, notes=notes)
    limit = round(encoding.max_seconds * SAMPLE_RATE_HZ)
    # The inverse of how 16-bit files are decoded, so that these come through unchanged.
    pcm = to_pcm16(samples[:limit])
    bare = Encoded(
        item.without_bytes(),
        num_samples=pcm.size,
        cut=samples.size > limit,
        silent=not pcm.any(),
        note="; ".join(notes) or None,
    )
    if bare.silent and encoding.drop_silent:
        return replace(bare, reason="silent")
    if encoding.truncation is not None:
        stored = encode_logmel(pcm, _features(encoding.truncation))
    else:
        buffer = io.BytesIO()
        soundfile.write(buffer, pcm, SAMPLE_RATE_HZ, format="FLAC", subtype="PCM_16")
        stored = buffer.getvalue()
    if len(stored) > MAX_MEMBER_BYTES:
        return replace(bare, reason=f"packed it is larger than {MAX_MEMBER_BYTES} bytes: lower --max-seconds")
    return replace(bare, data=stored)


@functools.cache
def _features(truncation: Truncation) -> ClapFeatures:
    return ClapFeatures(FeatureConfig(truncation), device="cpu")
