"""Hostfiles: one line a host, `worker-1 slots=8`.

DeepSpeed takes a missing file for "this machine alone", and `slots=4abc` for 4. Here every line is right, or nothing
starts and the line is named.

`python -m clap_zero.launching.hostfile FILE [--write OUT]` checks one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clap_zero.errors import ClapZeroError, ConfigError, LaunchError

FORM = "'worker-1 slots=8'"
MOST_SLOTS = 1024
"""More than any host has GPUs; DeepSpeed makes a list of all slots, and of 10^11 one that fills the memory."""
_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[0-9]{1,4000})")
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
"""A name as ssh and pdsh take it, with a user before it where they differ. A colon would be a port."""


@dataclass(frozen=True)
class HostSlots:
    """One line of a hostfile.

    Attributes:
        host: Name as ssh knows it.
        slots: Ranks that it may run, one a GPU.
        line: 1-based number of the line in the file.
    """

    host: str
    slots: int
    line: int


def read_hostfile(path: str | Path) -> list[HostSlots]:
    """All hosts of a file, in its order. Comments, blank lines, spaces, CRLF and a byte order mark are fine.

    Raises:
        LaunchError: No such file, not readable, no host in it, or a line that is not of the form `worker-1 slots=8`.
    """
    hosts: list[HostSlots] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if text:
            hosts.append(_parse(text, shown=line.strip(), place=f"{path}:{number}", line=number, before=hosts))
    if not hosts:
        raise LaunchError(f"{path} names no host: lines look like {FORM}; nothing was started")
    return hosts


def written(hosts: Sequence[HostSlots]) -> str:
    """The text of a hostfile that every launcher reads in the same way."""
    return "".join(f"{entry.host} slots={entry.slots}\n" for entry in hosts)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        reason = "there is no such file"
    except IsADirectoryError:
        reason = "it is a folder"
    except UnicodeDecodeError:
        reason = "it is not a text file"
    except OSError as error:
        reason = f"it cannot be read ({error.strerror})"
    raise LaunchError(f"no readable hostfile at {path}: {reason}; nothing was started") from None


def _parse(text: str, *, shown: str, place: str, line: int, before: Sequence[HostSlots]) -> HostSlots:
    match = _LINE.fullmatch(text)
    if match is None:
        raise LaunchError(f"{place}: {shown!r} is not of the form {FORM}; nothing was started")
    host, slots = match["host"], int(match["slots"])
    if host.count(":") > 1:
        raise LaunchError(
            f"{place}: {shown!r}: DeepSpeed reads no IPv6 addresses: name it in ~/.ssh/config or /etc/hosts, and write "
            "the name"
        )
    if ":" in host and _HOST.fullmatch(host.partition(":")[0]):
        raise LaunchError(
            f"{place}: {shown!r}: a port does not belong here: set Port for that host in ~/.ssh/config, or give "
            "`deepspeed` --ssh_port"
        )
    if _HOST.fullmatch(host) is None:
        raise LaunchError(f"{place}: {shown!r}: {host!r} is no name of a host; nothing was started")
    if slots == 0:
        raise LaunchError(f"{place}: {shown!r}: a host without slots runs nothing: remove the line, or give it slots=1")
    if slots > MOST_SLOTS:
        raise LaunchError(f"{place}: {shown!r}: a host has at most {MOST_SLOTS} slots, one a GPU; nothing was started")
    first = next((entry for entry in before if entry.host.lower() == host.lower()), None)
    if first is not None:
        raise LaunchError(
            f"{place}: {shown!r}: {host} is there twice, on line {first.line} too: give it one line with all its slots"
        )
    return HostSlots(host, slots, line)


def main(argv: Sequence[str] | None = None) -> int:
    """Check a hostfile and say how many hosts and slots it has; --write OUT leaves a clean copy.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if len(arguments) not in (1, 3) or (len(arguments) == 3 and arguments[1] != "--write"):
            raise ConfigError("usage: python -m clap_zero.launching.hostfile FILE [--write OUT]")
        hosts = read_hostfile(arguments[0])
        if len(arguments) == 3:
            Path(arguments[2]).write_text(written(hosts))
    except ClapZeroError as error:
        print(f"clap_zero: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"clap_zero: error: cannot write {arguments[2]}: {error.strerror}", file=sys.stderr)
        return LaunchError.exit_code
    print(f"{arguments[0]}: {len(hosts)} host(s), {sum(entry.slots for entry in hosts)} slots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
