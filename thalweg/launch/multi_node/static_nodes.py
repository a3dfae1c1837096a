"""This host's part of a job that is started on each host by hand, or by Kubernetes.

The options are torchrun's; where one is not given, the variable counts that torchrun reads for it
(``PET_NNODES`` and so on, which Kubeflow sets in every pod).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from thalweg.launch.hostfile import is_this_host
from thalweg.launch.spec import LaunchSpec
from thalweg.utils.env import read_meeting_point

if TYPE_CHECKING:
    from thalweg.launch.rendezvous import NodeSpec


def resolve_node(
    spec: LaunchSpec,
    num_nodes: str | None,
    node_rank: str | None,
    master_addr: str | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[LaunchSpec, NodeSpec | None]:
    """Where this host stands; None where it is the only one.  The spec gets ``PET_NPROC_PER_NODE``.

    Raises:
        ValueError: a number is none, or there are several hosts and nobody says where to meet.
    """
    num_nodes_text, nodes_name = _option_or_env("--num-nodes", num_nodes, "PET_NNODES", environ)
    node_rank_text, rank_name = _option_or_env("--node-rank", node_rank, "PET_NODE_RANK", environ)
    addr, _ = _option_or_env("--master-addr", master_addr, "PET_MASTER_ADDR", environ)
    if spec.nproc is None and (per_node := environ.get("PET_NPROC_PER_NODE")):
        spec = replace(spec, nproc=per_node)
    num_hosts = parse_num_nodes(nodes_name, num_nodes_text)
    index = 0 if node_rank_text is None else _parse_int(rank_name, node_rank_text)
    if num_hosts == 1:
        if index:
            raise ValueError(f"{rank_name} {index} is given, but not how many hosts there are: add --num-nodes N")
        if addr is not None and not is_this_host(addr):
            raise ValueError(f"--master-addr {addr} is another host: add --num-nodes N and --node-rank I")
        return spec, None
    if index >= num_hosts:
        raise ValueError(f"{rank_name} {index} must be from 0 to {num_hosts - 1}, as {nodes_name} is {num_hosts}")
    if node_rank_text is None:
        raise ValueError(
            f"{nodes_name} {num_hosts}: which host is this? Start `thalweg run` on each with --node-rank 0 to "
            f"{num_hosts - 1}, or on one alone with --hostfile"
        )
    known_addr, port_text = read_meeting_point(environ)
    if (addr := addr or known_addr) is None:
        raise ValueError(f"{nodes_name} {num_hosts}: add --master-addr, the first host's address, on each host")
    port = spec.master_port or _parse_int("the port to meet at,", port_text)
    from thalweg.launch.rendezvous import NodeSpec, bind_master

    listener = bind_master(addr, port, multi_node=True) if index == 0 else None
    return spec, NodeSpec(index, num_hosts, addr, port, listener)


def _option_or_env(flag: str, value: str | None, name: str, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """An option or the variable in its place, and which of the two to name in an error."""
    return (value, flag) if value is not None else (environ.get(name) or None, f"{name}=" if name in environ else flag)


def parse_num_nodes(name: str, text: str | None) -> int:
    """A number of hosts; 1 where none is given."""
    if text is None:
        return 1
    low, colon, high = text.partition(":")
    if colon and low != high:
        raise ValueError(f"{name} {text}: give one number; with --hostfile and --elastic-training hosts come and go")
    number = _parse_int(name, low)
    if number < 1:
        raise ValueError(f"{name} {text} must be at least 1")
    return number


def _parse_int(name: str, text: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise ValueError(f"{name} {text!r} is not a whole number")
    return int(text)
