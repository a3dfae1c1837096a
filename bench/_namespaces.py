"""Several hosts on one machine: network namespaces, two on a virtual cable or more on a switch.

Each host has its own network, host name, processes, IPC and /dev/shm, so that nothing but the cables join
them: shared-memory collectives must find out by themselves that they end at the host.  The cable can be
held to a rate by a token bucket on both ends, and made long: a round trip then takes a delay more, by the kernel's
netem or, where that is missing, a relay (`_delay_relay.py`).  Addresses exist inside the namespaces alone; no packet
leaves them.

Names carry the driver's pid.  A driver that was killed outright leaves empty namespaces (their holders read
from a pipe of the driver's and end with it); the next one sweeps them away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from _delay_relay import MTU
from _groups import RankPlacement

_PREFIX = "thalweg-bench-"
_CABLE = "cable0"
_TOOLS = ("ip", "tc", "unshare", "nsenter")


class NamespaceError(RuntimeError):
    """The machine does not let us make hosts; the message says what it lacks."""


def missing_reason() -> str | None:
    """Return what is missing for namespace hosts here, or None."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}: install iproute2 and util-linux (Linux only)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces: run it with sudo, or in a container with that right"
    return None


def parse_delay(delay: str) -> float:
    """Return the seconds of a delay as `tc` writes it: "20ms", "500us", "1s"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", delay)
    if found is None:
        raise ValueError(f'delay {delay!r} is none: write it as "20ms", "500us" or "1s"')
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def _run_command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NamespaceError(f"`{' '.join(words)}` failed: {done.stderr.strip() or 'no message'}")
    return done.stdout


def remove_stale() -> list[str]:
    """Delete the namespaces of drivers that are no longer alive, and return their names."""
    removed = []
    for line in _run_command("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _run_command("ip", "netns", "del", name)
            removed.append(name)
    return removed


class NamespaceHosts:
    """Hosts and their cables; `rate` as `tc` writes it ("1gbit"), None for unlimited ones.

    `delay` ("20ms"): by how much a round trip between two hosts is longer, half of it in each direction; `delayed_by`
    says by what then: "netem" or "relay".
    """

    def __init__(self, rate: str | None = None, num_hosts: int = 2, delay: str | None = None) -> None:
        self.rate, self.delayed_by = rate, None
        self._one_way = parse_delay(delay) / 2 if delay else 0.0
        self._relay: subprocess.Popen[bytes] | None = None
        self.names = [f"{_PREFIX}{os.getpid()}-{host}" for host in range(num_hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(num_hosts)]
        self._bridge = f"{_PREFIX}{os.getpid()}-switch"
        self._init_processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> NamespaceHosts:
        reason = missing_reason()
        if reason:
            raise NamespaceError(reason)
        remove_stale()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._remove()

    def _build(self) -> None:
        for name in self.names:
            _run_command("ip", "netns", "add", name)
        if self._one_way:
            self.delayed_by = "netem" if self._has_netem() else "relay"
        if self.delayed_by == "relay":
            self._start_relay()
        elif len(self.names) == 2:
            self._add_cable(self.names[0], _CABLE, self.names[1], _CABLE)
        else:
            _run_command("ip", "netns", "add", self._bridge)
            _run_command("ip", "-n", self._bridge, "link", "add", "bridge0", "type", "bridge")
            _run_command("ip", "-n", self._bridge, "link", "set", "bridge0", "up")
            for host, name in enumerate(self.names):
                self._add_cable(name, _CABLE, self._bridge, f"port{host}")
                _run_command("ip", "-n", self._bridge, "link", "set", f"port{host}", "master", "bridge0", "up")
        for host, name in enumerate(self.names):
            _run_command("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", _CABLE)
            _run_command("ip", "-n", name, "link", "set", "lo", "up")
            _run_command("ip", "-n", name, "link", "set", _CABLE, "up")
            place = ["root"]
            if self.delayed_by == "netem":
                delay = ("netem", "delay", f"{self._one_way * 1e6:.0f}us", "limit", "20000")
                _run_command("tc", "-n", name, "qdisc", "add", "dev", _CABLE, "root", "handle", "1:", *delay)
                place = ["parent", "1:1", "handle", "10:"]
            if self.rate:
                bucket = ("rate", self.rate, "burst", "256kb", "latency", "50ms")
                _run_command("tc", "-n", name, "qdisc", "add", "dev", _CABLE, *place, "tbf", *bucket)
            self._init_processes.append(self._start_init(name))

    def _has_netem(self) -> bool:
        """Whether the kernel delays packets by itself, tried on a host's loopback."""
        words = ("tc", "-n", self.names[0], "qdisc", "{}", "dev", "lo", "root", "netem")
        try:
            _run_command(*(word.replace("{}", "add") for word in words), "delay", "1ms")
        except NamespaceError:
            return False
        _run_command(*(word.replace("{}", "del") for word in words))
        return True

    def _start_relay(self) -> None:
        """Join two hosts by devices whose packets a process hands on; it ends when we do, or close its pipe."""
        if len(self.names) != 2:
            raise NamespaceError("without netem in the kernel a delay is between two hosts alone")
        program = str(Path(__file__).with_name("_delay_relay.py"))
        self._relay = subprocess.Popen(
            [sys.executable, program, *self.names, str(self._one_way), _CABLE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != b"ready\n":
            raise NamespaceError("the kernel has no netem, and TUN devices (/dev/net/tun), for a relay, were refused")
        for name in self.names:
            _run_command("ip", "-n", name, "link", "set", _CABLE, "mtu", str(MTU))

    def _add_cable(self, first: str, first_device: str, second: str, second_device: str) -> None:
        peer = ("type", "veth", "peer", "name", second_device, "netns", second)
        _run_command("ip", "link", "add", first_device, "netns", first, *peer)

    def _start_init(self, name: str) -> subprocess.Popen[bytes]:
        """Start the host's first process: it ends when we do, or close its pipe, and the others with it."""
        script = f"hostname {name} && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && echo ready && exec cat"
        unshare = ("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        holder = subprocess.Popen(
            ["ip", "netns", "exec", name, *unshare, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            holder.kill()
            holder.wait()
            raise NamespaceError("a host with its own name and /dev/shm could not be made (unshare was refused)")
        return holder

    def _remove(self) -> None:
        for holder in (*self._init_processes, *([] if self._relay is None else [self._relay])):
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.close()
            try:
                holder.wait(5)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()
            holder.stdout.close()
        self._init_processes, self._relay = [], None
        present = _run_command("ip", "netns", "list")
        for name in (*self.names, self._bridge):
            if name in present:
                _run_command("ip", "netns", "del", name)

    def init_pid(self, host: int) -> int:
        """Return the pid of the host's first process; all others end with it."""
        pid = self._init_processes[host].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def command_prefix(self, host: int) -> tuple[str, ...]:
        """Return the words that run a command on a host."""
        target = str(self.init_pid(host))
        return ("nsenter", "--target", target, "--net", "--uts", "--ipc", "--mount", "--pid")

    def disconnect(self, host: int) -> None:
        """Take a host off the network; it goes on by itself."""
        _run_command("ip", "-n", self.names[host], "link", "set", _CABLE, "down")

    def reconnect(self, host: int) -> None:
        """Undo :meth:`disconnect`."""
        _run_command("ip", "-n", self.names[host], "link", "set", _CABLE, "up")

    def placements(self, ranks_per_host: int) -> list[RankPlacement]:
        """Return where each rank runs, host by host, with the variables that a launcher would set there."""
        return [
            RankPlacement(
                self.command_prefix(host),
                {
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(ranks_per_host),
                    "LOCAL_SIZE": str(ranks_per_host),
                    "GROUP_RANK": str(host),
                    "MASTER_ADDR": "10.77.0.1",
                    "GLOO_SOCKET_IFNAME": _CABLE,
                },
            )
            for host in range(len(self.names))
            for local in range(ranks_per_host)
        ]

    def sent_mib(self) -> float:
        """Return how much the first host has sent over the cable so far, in MiB."""
        (link,) = json.loads(_run_command("ip", "-n", self.names[0], "-j", "-s", "link", "show", "dev", _CABLE))
        return link["stats64"]["tx"]["bytes"] / 2**20
