"""Variables on their way to other hosts.

DeepSpeed hands over those that start with PYTHON and few others, and the lines of `.deepspeed_env`: on a command line
that it logs and `ps` shows, in double quotes that quotes, $ and % break. Here every listed variable travels, as it is.
Plain ones go the same way, escaped. Secrets, and values that no command line can carry, go through a private file in
the checkout, which the program reads before it imports anything (`restore`).
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clap_zero.errors import LaunchError
from clap_zero.launching import leftovers

PREFIXES = (
    *("WANDB_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "NCCL_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_", "CUDA_"),
    *("OMP_", "MKL_", "PYTHON", "DEEPSPEED_", "DS_", "MLFLOW", "AWS_", "CLAP_ZERO_"),
)
FORWARD = "CLAP_ZERO_FORWARD"
PRIVATE_FILE = "CLAP_ZERO_VARIABLES_FILE"
PRIVATE_NAMES = "CLAP_ZERO_VARIABLES_NAMES"
STAYS = frozenset(("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE", "WANDB_SERVICE", FORWARD, PRIVATE_FILE, PRIVATE_NAMES))
"""Variables that belong to the process that has them, whatever their prefix."""

SHOWN_BY_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Prefixes of the variables that DeepSpeed puts on its command line by itself."""

ENV_FILE_NAME = ".deepspeed_env"
_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_SECRET = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASS|PWD$|CRED|AUTH|_PAT$|DSN|COOKIE|^AWS_")
_URL_WITH_PASSWORD = re.compile(r"://[^/?#\s]*@|://\S*:\S*@")
_SPECIAL = re.compile(r"[^\w@%+=:,./-]")
"""The characters at which DeepSpeed puts a value into double quotes."""

_REFERENCE = re.compile(r"\$(?!\{?[A-Za-z_])")


@dataclass(frozen=True)
class Variable:
    """One variable on its way.

    Attributes:
        value: Its text.
        expands: Whether $NAME in it is filled in on the other host, as DeepSpeed does in `.deepspeed_env`.
    """

    value: str
    expands: bool = False


@dataclass(frozen=True)
class Baggage:
    """What travels and how.

    Attributes:
        shown: Lines for DeepSpeed's environment file: they end up on a command line.
        private: Name -> value of what does not.
    """

    shown: Mapping[str, str] = field(default_factory=dict)
    private: Mapping[str, str] = field(default_factory=dict)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable has no place in a log or in the list of processes."""
    return _SECRET.search(name.upper()) is not None or _URL_WITH_PASSWORD.search(value) is not None


def read_env_files() -> dict[str, Variable]:
    """The variables of `.deepspeed_env` in the home directory and in the working directory, the latter stronger.

    Raises:
        LaunchError: A line that is neither blank nor a comment nor NAME=value.
    """
    name = os.environ.get("DS_ENV_FILE", ENV_FILE_NAME)
    found: dict[str, Variable] = {}
    for path in dict.fromkeys((Path.home() / name, Path(name).absolute())):
        if not path.is_file():
            continue
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None:
                # Not the text: it may be a secret.
                raise LaunchError(f"{path}:{number}: this line is not of the form NAME=value; nothing was started")
            found[match[1]] = Variable(match[2], expands=True)
    return found


def gather() -> dict[str, Variable]:
    """Every variable that has to be the same on all hosts.

    Raises:
        LaunchError: A bad line in `.deepspeed_env`, or CLAP_ZERO_FORWARD names a variable that is not set.
    """
    variables = {
        name: Variable(value)
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) and name not in STAYS and _LINE.match(f"{name}=")
    }
    # The checkout and the programs beside this Python, as DeepSpeed does and as an activated environment does.
    variables["PYTHONPATH"] = Variable(":".join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))))
    variables["PATH"] = Variable(f"{Path(sys.executable).parent}:$PATH", expands=True)
    for name in filter(None, re.split(r"[,\s]+", os.environ.get(FORWARD, ""))):
        if name not in os.environ:
            raise LaunchError(f"{FORWARD} names {name}, which is not set here; nothing was started")
        variables[name] = Variable(os.environ[name])
    return variables | read_env_files()


def pack(variables: Mapping[str, Variable], *, shell: bool) -> Baggage:
    """Decide which way each variable goes.

    Args:
        shell: Whether pdsh and a shell read the values on the other side; without, they arrive as DeepSpeed wrote
            them, its quotes included.
    """
    shown: dict[str, str] = {}
    private: dict[str, str] = {}
    for name, variable in variables.items():
        value = variable.value
        carried = value == value.strip() and value.isprintable() and (shell or not _SPECIAL.search(value + name))
        carried = carried and (shell or "," not in value)  # srun splits its list of variables there
        if is_secret(name, value) or not carried:
            private[name] = value
        else:
            shown[name] = _for_shell(variable) if shell else value
    if not shell:
        # Without a shell nothing is filled in over there, and these launchers keep PATH anyway.
        for name in [name for name, variable in variables.items() if variable.expands and "$" in variable.value]:
            shown.pop(name, None)
            private[name] = os.path.expandvars(variables[name].value)
    return Baggage(shown, private)


def write_private(values: Mapping[str, str], folder: Path) -> Path:
    """Leave values in a file that only this user reads, as long as this process lives.

    Files of launchers on this host that were killed are removed.

    Raises:
        LaunchError: The folder cannot be written.
    """
    # Hosts apart: not every shared disk passes locks on from one to the other.
    prefix = f".variables-{socket.gethostname()}-"

    def make() -> Path:
        descriptor, name = tempfile.mkstemp(".json", prefix, folder)  # readable for the owner alone
        os.close(descriptor)
        return Path(name)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        leftovers.remove_abandoned(folder.glob(f"{prefix}*.json"))
        path = leftovers.keep(make)
        path.write_text(json.dumps(dict(values)))
    except OSError as error:
        raise LaunchError(
            f"{', '.join(values)} cannot travel to the other hosts: {folder} is not writable ({error.strerror})"
        ) from error
    return path


def write_owner_only(path: Path, text: str) -> None:
    """Write a new file that nobody else can read, at no moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def restore() -> None:
    """In a rank: take up what travelled in the private file. Before anything is imported that reads it.

    A host that does not see the file goes on without, and says so: the ranks there may not need a key at all.
    """
    path, names = os.environ.pop(PRIVATE_FILE, ""), os.environ.pop(PRIVATE_NAMES, "")
    if not path:
        return
    try:
        os.environ.update(json.loads(Path(path).read_text()))
    except (OSError, ValueError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"clap_zero: warning: {names.replace(',', ', ')} did not reach {socket.gethostname()}: they travel "
                f"through a file in the checkout, which this host does not see ({error}); set them there, or log in "
                "there with `wandb login` or `hf auth login`",
                file=sys.stderr,
                flush=True,
            )


def hide(names: Sequence[str]) -> None:
    """Keep DeepSpeed from putting these on its command line by itself."""
    for name in names:
        if name.startswith(SHOWN_BY_DEEPSPEED):
            os.environ.pop(name, None)


def _for_shell(variable: Variable) -> str:
    """A value as it has to stand in DeepSpeed's file, so that pdsh and the other host's shell make it whole again."""
    text = variable.value.replace("%", "%%")
    if not _SPECIAL.search(text):
        return text
    text = re.sub(r'([\\"`])', r"\\\1", text)
    return _REFERENCE.sub(r"\\$", text) if variable.expands else text.replace("$", r"\$")
