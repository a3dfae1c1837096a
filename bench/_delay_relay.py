"""A cable that takes its time, where the kernel has no netem: two TUN devices, and this process between them.

    host 0   cable0 (tun)  ->  read, wait, write  ->  cable0 (tun)   host 1, and back

It makes the devices inside the hosts' namespaces (`ip netns`), prints a line, and hands packets on until its input
ends, each after the same wait and in order.  The devices go with it.  Packets are large, so that a rate of 1 Gbit/s is
some 14,000 of them a second, which Python hands on.

    python bench/_delay_relay.py NAMESPACE NAMESPACE SECONDS DEVICE
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
# Packets that wait; more than a cable of 1 Gbit/s holds in a second.
_MAX_WAITING = 20_000


def open_tun(namespace: str, device: str) -> int:
    """Make a TUN device in a namespace of `ip netns`; return its file, which reads and writes one packet at a time."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into {namespace} was refused")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(home)
        os.close(there)
    return tun


def relay(tuns: tuple[int, int], seconds: float, until: int) -> None:
    """Hand packets from each device to the other after ``seconds``, until the file ``until`` ends."""
    waiting: dict[int, deque[tuple[float, bytes]]] = {tun: deque() for tun in tuns}
    poller = select.poll()
    for file in (*tuns, until):
        poller.register(file, select.POLLIN)
    while True:
        next_due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        timeout = None if next_due is None else max(0.0, 1000 * (next_due - time.monotonic()))
        for file, _ in poller.poll(timeout):
            if file == until:
                return
            try:
                packet = os.read(file, MTU)
            except OSError:  # its device is down: `NamespaceHosts.disconnect`
                time.sleep(0.001)
                continue
            if len(waiting[file]) < _MAX_WAITING:
                waiting[file].append((time.monotonic() + seconds, packet))
        now = time.monotonic()
        for source, target in (tuns, tuns[::-1]):
            while waiting[source] and waiting[source][0][0] <= now:
                try:
                    os.write(target, waiting[source].popleft()[1])
                except OSError:  # down, or full: a packet is lost, as on any cable
                    break


def main() -> None:
    """See the head of this file."""
    first, second, seconds, device = sys.argv[1:]
    tuns = open_tun(first, device), open_tun(second, device)
    print("ready", flush=True)
    relay(tuns, float(seconds), sys.stdin.fileno())


if __name__ == "__main__":
    main()
