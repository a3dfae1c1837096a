"""Which of this host's interfaces leads to an address; asked of the kernel, nothing is sent."""

import socket
import struct
import sys

_SIOCGIFADDR = 0x8915


def local_address_for(addr: str, port: int = 1) -> str | None:
    """The address this host would use to talk to ``addr``; None where there is no way."""
    try:
        family, _, _, _, target = socket.getaddrinfo(addr, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return None


def interface_for(addr: str) -> str | None:
    """The interface whose IPv4 address :func:`local_address_for` gives, None where it cannot be told.

    An address of this very host is reached over ``lo`` but known to others by its own interface, which is
    the one that counts; only 127.0.0.0/8 means ``lo``.
    """
    local_address = local_address_for(addr)
    if local_address is None or not sys.platform.startswith("linux"):
        return None
    return next((name for _, name in socket.if_nameindex() if _interface_address(name) == local_address), None)


def _interface_address(interface: str) -> str | None:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:  # it has no IPv4 address
            return None
