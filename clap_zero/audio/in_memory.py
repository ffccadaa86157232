"""Sound files in memory, as libsndfile reads them."""

from __future__ import annotations

import io

import soundfile


class _Bytes(io.BytesIO):
    """A damaged header can send libsndfile in front of the first byte. BytesIO would raise inside its callback, which
    nobody can catch and which is printed with a traceback; there is simply nothing there, as there is behind the last.
    """

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return super().seek(max(0, offset) if whence == io.SEEK_SET else offset, whence)


def open_sound(data: bytes) -> soundfile.SoundFile:
    """Opens a sound file.

    Raises:
        soundfile.LibsndfileError: libsndfile cannot read it.
    """
    return soundfile.SoundFile(_Bytes(data))
