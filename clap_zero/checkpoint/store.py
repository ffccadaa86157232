"""The directory of checkpoints: each one is complete or is not there.

    checkpoints/
      step-00000100/       complete: manifest.json in it was written last, then the directory was renamed to this name
      latest, best         one line each, the name of a directory; replaced in one step
      .tmp-...             being written or removed, or left by an attempt that died; removed at the next save
      .old-step-...        the previous contents of a step that is being saved again, for the moment of the exchange

A checkpoint is newest by the `sequence` in its manifest, not by its step: a run that went back to step 50 and saved
step 60 continues from there, although step 100 of the abandoned branch may still exist. Only one process (rank 0)
may write; anybody may read. Nothing here knows torch or ranks.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clap_zero.checkpoint.files import FileRecord, fsync_directory, write_json, write_text_atomic
from clap_zero.checkpoint.manifest import MANIFEST, MANIFEST_FORMAT, Rejected, find_fault, read_manifest
from clap_zero.errors import CheckpointError

_log = logging.getLogger(__name__)

STEP_NAME = re.compile(r"step-(\d{8,})")
OLD_NAME = re.compile(r"\.old-(step-\d{8,})(?:\.\w+)?")
OLD_PREFIX, TEMPORARY_PREFIX = ".old-", ".tmp-"


def step_name(step: int) -> str:
    """Name of the directory of an optimizer step."""
    return f"step-{step:08d}"


class CheckpointStore:
    """The checkpoints of one run.

    Attributes:
        root: The `checkpoints` directory of the run; it need not exist yet.
        rejected: What the last look (`newest_complete`, `resolve`) found unusable, and why.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.rejected: list[Rejected] = []

    # ---- reading

    def candidates(self) -> list[Path]:
        """All checkpoint directories with a readable manifest, newest first; the others go to `rejected`."""
        self.rejected = []
        found: list[tuple[int, int, Path]] = []
        names = sorted(entry.name for entry in self.root.iterdir() if entry.is_dir()) if self.root.is_dir() else []
        for name in names:
            path = self.root / name
            old = OLD_NAME.fullmatch(name)
            base = name if old is None else old[1]
            if old is not None and (self.root / base).is_dir():
                continue  # only stands in while the exchange is incomplete
            if name.startswith(TEMPORARY_PREFIX):
                removal = name.startswith(f"{TEMPORARY_PREFIX}removed-")
                self.rejected.append(Rejected(path, "an unfinished removal" if removal else "an unfinished save"))
            elif STEP_NAME.fullmatch(base):
                try:
                    manifest = read_manifest(path)
                    found.append((int(manifest["sequence"]), int(manifest["step"]), path))
                except CheckpointError as error:
                    self.rejected.append(Rejected(path, str(error).removeprefix(f"{path}: ")))
        return [path for _, _, path in sorted(found, reverse=True)]

    def newest_complete(self, *, checksums: bool = True) -> Path | None:
        """Finds the newest checkpoint whose files are all as they were written.

        Never trusts `latest` alone: it may be missing, or name a directory that is gone. Everything bad that was met on
        the way is in `rejected`. Sizes are checked for all checkpoints, checksums only for those that could be taken.

        Returns:
            Its directory, or None when there is none.
        """
        chosen = None
        for path in self.candidates():
            fault = find_fault(path, checksums=checksums and chosen is None)
            if fault is not None:
                self.rejected.append(Rejected(path, fault))
            elif chosen is None:
                chosen = path
        pointer = self.root / "latest"
        if chosen is not None and not pointer.exists():
            self.rejected.append(Rejected(pointer, f"is missing; {chosen.name} is the newest complete checkpoint"))
        elif pointer.exists() and not (self.root / self._read_pointer("latest")).is_dir():
            name = self._read_pointer("latest")
            self.rejected.append(Rejected(pointer, f"names {name or 'nothing'}, which is not there"))
        return chosen

    def resolve(self, which: str | int | Path, *, checksums: bool = True) -> Path | None:
        """Finds the checkpoint that a user means.

        Args:
            which: `auto` (newest complete one, or None when there is none at all), `latest` (the same, but an error
                when there is none), `best`, a step, or the path of a checkpoint, of a `checkpoints` directory or a run.
            checksums: Compare the contents of the files, too.

        Returns:
            Its directory; None only for `auto` without any complete checkpoint.

        Raises:
            CheckpointError: It is not there or not complete; the message names what there is.
        """
        text = str(which)
        if text in ("auto", "latest"):
            path = self.newest_complete(checksums=checksums)
            if path is None and text == "latest":
                bad = "; ".join(map(str, self.rejected))
                raise CheckpointError(f"no complete checkpoint in {self.root}{f' ({bad})' if bad else ''}")
            return path
        if text == "best":
            name = self._read_pointer("best")
            if not name:
                raise CheckpointError(f"no checkpoint of {self.root} is marked as best: use latest or {self._steps()}")
            path = self.root / name
        elif re.fullmatch(r"\d+", text):
            path = self.root / step_name(int(text))
            if not path.is_dir():
                raise CheckpointError(f"no checkpoint of step {text} in {self.root}: it has {self._steps()}")
        else:
            path = Path(text)
            nested = next((p for p in (path / "checkpoints", path) if _holds_checkpoints(p)), None)
            if nested is not None and not (path / MANIFEST).exists():
                store = CheckpointStore(nested)
                try:
                    return store.resolve("latest", checksums=checksums)
                finally:
                    self.rejected = store.rejected
        if not path.is_dir():
            raise CheckpointError(f"no checkpoint at {path}")
        fault = find_fault(path, checksums=checksums)
        if fault is not None:
            raise CheckpointError(f"checkpoint {path} cannot be used: {fault}. Others in {self.root}: {self._steps()}")
        return path

    def _steps(self) -> str:
        steps = [int(m[1]) for path in self.candidates() if (m := STEP_NAME.fullmatch(path.name))]
        return "steps " + ", ".join(map(str, sorted(steps))) if steps else "none"

    def _read_pointer(self, name: str) -> str:
        try:
            return (self.root / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    # ---- writing: one process only

    def begin(self, step: int) -> Path:
        """Makes the empty directory that a save writes into, after removing what dead attempts left.

        Raises:
            OSError: The file system is full or not writable.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        complete = self.candidates()
        # The newest first: of several stand-ins for one step it is the one that counts.
        for entry in [*complete, *(path for path in self.root.iterdir() if path not in complete)]:
            old = OLD_NAME.fullmatch(entry.name)
            if old is not None and not (self.root / old[1]).is_dir():  # died between the two renames of an exchange
                entry.rename(self.root / old[1])
            elif old is not None or (entry.name.startswith(TEMPORARY_PREFIX) and entry.is_dir()):
                self._discard(entry)
        temporary = self.root / f"{TEMPORARY_PREFIX}{step_name(step)}.{_unique()}"
        temporary.mkdir()
        return temporary

    def commit(
        self, temporary: Path, step: int, files: Mapping[str, FileRecord], *, about: Mapping[str, Any] | None = None
    ) -> Path:
        """Turns a written directory into a checkpoint: manifest, durable names, rename, `latest`.

        Args:
            temporary: What `begin` returned, with all files of all ranks in it.
            step: Optimizer step.
            files: Records of all files by path relative to the directory.
            about: More entries for the manifest (world size, stage, precision).

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: A file is not there as its writer recorded it (a directory that the nodes do not share).
            OSError: The file system is full or not writable.
        """
        for name, record in files.items():
            file = temporary / name
            size = file.stat().st_size if file.is_file() else None
            if size != record.size_bytes:
                raise CheckpointError(
                    f"{name} was written with {record.size_bytes} bytes but rank 0 sees "
                    f"{'no such file' if size is None else f'{size} bytes'}: the run directory {self.root.parent} "
                    "must be on a file system that all nodes share"
                )
        sequence = 1 + max((int(read_manifest(path)["sequence"]) for path in self.candidates()), default=0)
        manifest = {"format": MANIFEST_FORMAT, "step": step, "sequence": sequence, **(about or {})}
        manifest["files"] = {name: asdict(record) for name, record in sorted(files.items())}
        for directory in sorted({(temporary / name).parent for name in files}):
            fsync_directory(directory)
        write_json(temporary / MANIFEST, manifest)
        fsync_directory(temporary)
        final = self.root / step_name(step)
        old = self.root / f"{OLD_PREFIX}{final.name}.{_unique()}"
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        fsync_directory(self.root)
        write_text_atomic(self.root / "latest", final.name + "\n")
        if old.exists():
            self._discard(old)
        return final

    def abandon(self, temporary: Path) -> None:
        """Removes a directory whose save failed; what cannot be removed now is removed at the next save."""
        self._discard(temporary)

    def _discard(self, path: Path) -> None:
        """Removes a directory. What cannot be removed is no reason to stop training: the next save tries again."""
        try:
            if not path.name.startswith(TEMPORARY_PREFIX):
                # The rename first: a removal that is cut short must not leave what looks like a checkpoint.
                path = path.rename(self.root / f"{TEMPORARY_PREFIX}removed-{path.name.strip('.')}.{_unique()}")
            shutil.rmtree(path)
        except OSError as error:
            _log.warning("%s could not be removed: %s", path, error)

    def mark_best(self, step: int) -> None:
        """Names the checkpoint of this step as `best`; it is kept whatever its age.

        Raises:
            CheckpointError: There is no complete checkpoint of this step.
        """
        path = self.resolve(step, checksums=False)
        assert path is not None
        write_text_atomic(self.root / "best", path.name + "\n")

    def prune(self, keep: int) -> list[Path]:
        """Removes all but the newest `keep` complete checkpoints, the best one and what `latest` names.

        Directories of unfinished or damaged checkpoints older than the newest complete one go, too.

        Returns:
            What was removed.
        """
        assert keep >= 1
        complete = [path for path in self.candidates() if find_fault(path, checksums=False) is None]
        damaged = [path for path in self.root.glob("step-*") if path.is_dir() and path not in complete]
        if not complete:
            return []
        kept = {path.name for path in complete[:keep]} | {self._read_pointer("best"), self._read_pointer("latest")}
        removed = [path for path in complete if path.name not in kept]
        removed += [path for path in damaged if STEP_NAME.fullmatch(path.name) and path.name < complete[0].name]
        for path in removed:
            self._discard(path)
        return removed


def _unique() -> str:
    """A part of a name that no leftover has."""
    return uuid.uuid4().hex[:12]


def _holds_checkpoints(path: Path) -> bool:
    return path.is_dir() and any(STEP_NAME.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir())
