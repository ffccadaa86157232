"""The directory of a run: its lock, the configuration that it was started with, and whether it is finished.

Used by rank 0, except for the lock, which every rank of the job holds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from clap_zero.errors import ConfigError, LaunchError
from clap_zero.model import mlp_heads
from clap_zero.training.run_changes import changes

OF_THE_MODEL = ("model.preset", "objective.loss")
"""Keys that decide which parameters there are: no checkpoint fits after a change, forced or not."""

FOREIGN_NAMES = {"sizes.json", "config.json", "model.safetensors", "manifest.csv", ".git"}
"""What tells that a directory is shards, a model or a checkout, and not a run."""

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems without locks answer: some NFS mounts, Lustre without -o flock, object stores."""


class RunLock:
    """Keeps a second job out of a run directory while a process of the first lives, orphans included.

    Rank 0 takes the lock alone, which proves that nobody is left, then shares it with the other ranks. The kernel drops
    the lock of a process that dies.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ".lock"
        self._file: Any = None

    def acquire_alone(self, *, wait_s: float) -> None:
        """Take the lock with nobody else holding it.

        Args:
            wait_s: Seconds to wait for the processes of a killed job to go away.

        Raises:
            LaunchError: Another job still uses the directory.
        """
        self._file = self._path.open("a+")
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in NO_LOCKS:
                    print(f"clap_zero: warning: {self._path}: no file locks here; let only one job use this directory")
                    break
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if time.monotonic() > deadline:
                    self._file.seek(0)
                    holder = self._file.read().strip() or "an unknown process"
                    self.release()
                    raise LaunchError(
                        f"{self._path.parent} is in use by another job ({holder}): wait for it, stop it, or give "
                        "another --run_dir"
                    ) from None
                time.sleep(0.2)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self._file.flush()

    def share(self) -> None:
        """Hold the lock together with the other ranks. Rank 0 calls it after `acquire_alone`, the others then."""
        if self._file is None:
            self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return
            self.release()
            raise LaunchError(f"another job took {self._path.parent} at this moment: give another --run_dir") from None

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class RunDirectory:
    """Paths and records of one run.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Make the directory.

        Raises:
            LaunchError: It cannot be made or written.
            ConfigError: It holds something else, which the run would write over.
        """
        foreign = self._foreign_file()
        if foreign is not None:
            raise ConfigError(
                f"{self.path} holds {foreign}, which no run wrote: give another --run_dir, so that the files of a run "
                "do not mix with it"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".write_test"
            probe.write_text("x")
            probe.unlink()
        except OSError as error:
            raise LaunchError(
                f"cannot write the run directory {self.path}: {error.strerror}; give another --run_dir"
            ) from error

    def _foreign_file(self) -> str | None:
        """A file of shards, a model or a user's own configuration; `record` writes data.json before the others."""
        if not self.path.is_dir():
            return None
        names = {path.name for path in self.path.iterdir()}
        own = {"config.yaml", "ds_config.json"} if "data.json" not in names else set()
        return next((n for n in sorted(names) if n in own | FOREIGN_NAMES or n.endswith(".tar")), None)

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    def recorded_ds_config(self) -> dict[str, Any] | None:
        """The DeepSpeed configuration that the run took its steps with, None before the first."""
        return self._read_json("ds_config.json") if self.has_trained() else None

    def finished_step(self) -> int | None:
        """The last step of a finished run, None while it is not finished."""
        step = (self._read_json("finished.json") or {}).get("step")
        return step if isinstance(step, int) else None

    def mark_finished(self, step: int) -> None:
        self._write("finished.json", json.dumps({"step": step}) + "\n")

    def has_trained(self) -> bool:
        """Whether a step was taken or a checkpoint written."""
        # Checkpoints first: the lines of a long run take seconds to read.
        has_checkpoints = any(self.checkpoints_path.glob("step-*"))
        return has_checkpoints or any("loss" in line for line in read_jsonl(self.metrics_path))

    def next_attempt(self) -> int:
        """1 for the first start, one more for each later one."""
        attempts = [line.get("attempt", 0) for line in read_jsonl(self.metrics_path)]
        return 1 + max(attempts, default=0)

    def check_unchanged(
        self, *, run: dict[str, Any], ds: dict[str, Any], data: dict[str, Any], world_size: int, force: bool
    ) -> None:
        """Refuse to continue a run with another configuration. Other ranks and another ZeRO stage are none.

        Args:
            run: The resolved run config.
            ds: The resolved DeepSpeed configuration.
            data: Fingerprints and sizes of the data.
            world_size: Ranks of this start.
            force: Accept the differences, and print them.

        Raises:
            ConfigError: Something that matters differs; the message is the difference.
        """
        # A run that has not taken a step yet may still be corrected.
        if not self.has_trained():
            return
        try:
            differences = self._differences({"run": run, "ds": ds, "data": data}, world_size=world_size)
        except ConfigError as error:
            if not force:
                raise
            differences = [str(error)]
        if differences and force:
            # Numbers that nobody set may be among them: the global batch is chosen anew, too.
            print("clap_zero: warning: --force continues a run with other settings:\n  " + "\n  ".join(differences))
        elif differences:
            raise ConfigError(
                f"{self.path} holds a run with another configuration:\n  "
                + "\n  ".join(differences)
                + f"\ngive another --run_dir for a new run{self._forcible(differences)}"
            )

    def _differences(self, now: dict[str, Any], *, world_size: int) -> list[str]:
        """What this start has otherwise than the record. Raises ConfigError where the record is gone or damaged."""
        run = self._read_yaml("config.yaml")
        if run is None:
            raise ConfigError(
                f"{self.path} holds a run, but its config.yaml is gone, so nobody can tell whether this command "
                "continues it: restore it, give another --run_dir, or --force to continue"
            )
        before = {"run": run, "ds": self.recorded_ds_config() or {}, "data": self._read_json("data.json") or {}}
        return changes(before, now, world_size=world_size)

    def _forcible(self, differences: list[str]) -> str:
        """What --force could do: nothing where checkpoints would not fit the model any more."""
        if any(self.checkpoints_path.glob("step-*")):
            keys = [line.partition(":")[0] for line in differences]
            of_heads = any(self.checkpoints_path.glob(f"step-*/{mlp_heads.FILE}"))
            other = next((key for key in keys if key in OF_THE_MODEL or (of_heads and key == "objective.mlp")), None)
            if other is not None:
                return f": the checkpoints here are of another model than this {other} makes, so --force cannot help"
            if "model.pretrained" in keys:
                return ", or --force to continue this one, if model.pretrained is the same model in another place"
        return ", or --force to continue this one with the changes"

    def record(self, *, run: str, ds: dict[str, Any], data: dict[str, Any], private: bool = False) -> None:
        """Write the resolved configuration; a run can be started again from it.

        Args:
            run: The run config as YAML.
            ds: The resolved DeepSpeed configuration.
            data: Fingerprints and sizes of the data.
            private: The run config holds credentials: only its owner may read it.
        """
        self._write("data.json", json.dumps(data, indent=2) + "\n")
        self._write("ds_config.json", json.dumps(ds, indent=2) + "\n")
        self._write("config.yaml", run, mode=0o600 if private else 0o666)  # last: when it is there, all three are

    def set_aside(self) -> Path:
        """Move the whole directory out of the way; nothing is deleted.

        Returns:
            Where it is now.
        """
        path, number = self.path.resolve(), 1
        while (target := path.with_name(f"{path.name}.old-{number}")).exists():
            number += 1
        path.rename(target)
        return target

    def _read_json(self, name: str) -> dict[str, Any] | None:
        return _parse(self.path / name, json.loads)

    def _read_yaml(self, name: str) -> dict[str, Any] | None:
        return _parse(self.path / name, yaml.safe_load)

    def _write(self, name: str, text: str, *, mode: int = 0o666) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.unlink(missing_ok=True)  # what a kill left keeps its own mode
        with open(temporary, "w", opener=partial(os.open, mode=mode)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / name)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSON-lines file; a line that a kill tore is passed over."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def _parse(path: Path, parser: Any) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = parser(path.read_text())
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; restore it, or give another --run_dir") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it holds no keys; restore it, or give another --run_dir")
    return value
