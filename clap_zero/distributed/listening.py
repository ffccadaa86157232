"""A listening socket where the other ranks find it, and room for one connection from each. Light: no torch."""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket

BACKLOG = 4096


def listen(address: str, *, one_host: bool, port: int = 0) -> socket.socket:
    """A listening socket on the address that the others reach; on all addresses where it is not one of this machine.

    Several machines may call an address by the same name and mean different things: on Debian a host's own name is
    127.0.1.1 at home.

    Args:
        address: Name or address of this machine.
        one_host: Whether all who call are on this machine.
        port: 0 has the system choose one.

    Raises:
        OSError: The port is taken.
    """
    with contextlib.suppress(OSError, ValueError):
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if one_host or not ipaddress.ip_address(place[0]).is_loopback:
            return socket.create_server((str(place[0]), port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


def allow_files() -> None:
    """Raises the soft limit of open files: rank 0 holds one connection for each rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))
