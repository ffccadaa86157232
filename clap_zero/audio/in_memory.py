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


class _Sound(soundfile.SoundFile):
    """After each read soundfile seeks to where the file stands already, if it can be sought. That takes time, and fails
    where the file has a broken table of places, or a codec that cannot seek: what was read would be lost."""

    def seekable(self) -> bool:
        return False


def open_sound(data: bytes) -> soundfile.SoundFile:
    """Opens a sound file.

    Raises:
        soundfile.LibsndfileError: libsndfile cannot read it.
    """
    return _Sound(_Bytes(data))
