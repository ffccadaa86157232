"""DeepSpeed's own part of a checkpoint, written so that an error on one rank cannot hang the others.

`engine.save_checkpoint` has barriers between its writes: a rank that raises in one of them (disk full) leaves the rest
waiting. So the writes go through a checkpoint engine that keeps the first error for later, checksums what passes
through and flushes it to the disk. The ranks compare their errors after the last barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from clap_zero.checkpoint.files import ChecksummedFile, FileRecord
from clap_zero.distributed.collectives import patient_wait

ENGINE_TAG = "engine"
"""Name of the subdirectory with DeepSpeed's files."""


class _PatientFile(ChecksummedFile):
    """Remembers the first write error: raised inside `torch.save`, it would end in a C++ destructor."""

    error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        if self.error is None:
            super().flush()


class GuardedCheckpointEngine(CheckpointEngine):
    """Synchronous writes with checksums; errors are kept in `error` instead of raised.

    Attributes:
        records: Size and checksum of each file written, by path relative to the checkpoint.
        error: The first error, or None.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.name = "GuardedCheckpointEngine"
        self.root = root
        self.records: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a directory."""
        try:
            Path(path).mkdir(parents=True, exist_ok=exist_ok)
        except OSError as error:
            self.error = self.error or error

    def save(self, state_dict: Any, path: str) -> None:
        """Writes one file with torch.save."""
        if self.error is not None:
            return
        try:
            with _PatientFile(Path(path)) as file:
                torch.save(state_dict, cast(IO[bytes], file))
                if file.error is not None:
                    raise file.error
            self.records[str(Path(path).relative_to(self.root))] = file.record
        except OSError as error:
            self.error = error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Not used: loading goes through the engine's own."""
        raise NotImplementedError("this checkpoint engine only writes")

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Nothing to write: the files are on the disk when `save` returns. Collective: a barrier follows."""
        patient_wait()
        return True


@contextmanager
def _guarded(engine: DeepSpeedEngine, guard: GuardedCheckpointEngine) -> Iterator[None]:
    own = engine.checkpoint_engine
    engine.checkpoint_engine = guard
    # DeepSpeed copies two scripts beside the files (rank 0 only, an error there would hang the rest). The consolidated
    # weights make them superfluous.
    engine._copy_recovery_script = lambda _: None
    try:
        yield
    finally:
        engine.checkpoint_engine = own
        del engine._copy_recovery_script


def save_engine(engine: DeepSpeedEngine, root: Path) -> tuple[dict[str, FileRecord], OSError | None]:
    """Writes DeepSpeed's native files into root/engine. Collective: all ranks must call.

    Returns:
        This rank's files, and its first error.
    """
    guard = GuardedCheckpointEngine(root)
    with _guarded(engine, guard):
        engine.save_checkpoint(str(root), tag=ENGINE_TAG, save_latest=False)
    return guard.records, guard.error
