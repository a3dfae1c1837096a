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

from thalweg.launch.hosts import is_this_host
from thalweg.launch.request import Request

if TYPE_CHECKING:
    from thalweg.launch.peers import Place

DEFAULT_PORT = 29500


def place_of(
    request: Request,
    num_nodes: str | None,
    node_rank: str | None,
    master_addr: str | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Request, Place | None]:
    """Where this host stands; None where it is the only one.  The request gets ``PET_NPROC_PER_NODE``.

    Raises:
        ValueError: a number is none, or there are several hosts and nobody says where to meet.
    """
    nodes, nodes_name = _given("--num-nodes", num_nodes, "PET_NNODES", environ)
    rank, rank_name = _given("--node-rank", node_rank, "PET_NODE_RANK", environ)
    addr, _ = _given("--master-addr", master_addr, "PET_MASTER_ADDR", environ)
    endpoint = environ.get("PET_RDZV_ENDPOINT", "")
    if request.nproc is None and (per_node := environ.get("PET_NPROC_PER_NODE")):
        request = replace(request, nproc=per_node)
    num_hosts = _hosts(nodes_name, nodes)
    index = 0 if rank is None else _number(rank_name, rank)
    if num_hosts == 1:
        if index:
            raise ValueError(
                f"{rank_name} {index} is given, but not how many hosts there are: add --num-nodes N"
            )
        if addr is not None and not is_this_host(addr):
            raise ValueError(f"--master-addr {addr} is another host: add --num-nodes N and --node-rank I")
        return request, None
    if index >= num_hosts:
        raise ValueError(
            f"{rank_name} {index} must be from 0 to {num_hosts - 1}, as {nodes_name} is {num_hosts}"
        )
    if rank is None:
        raise ValueError(
            f"{nodes_name} {num_hosts}: which host is this? Start `thalweg run` on each with --node-rank "
            "0 to "
            f"{num_hosts - 1}, or on one alone with --hostfile"
        )
    host, _, port_text = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
    addr = addr or host or environ.get("MASTER_ADDR")
    port_text = environ.get("PET_MASTER_PORT") or port_text or environ.get("MASTER_PORT") or str(DEFAULT_PORT)
    if addr is None:
        raise ValueError(
            f"{nodes_name} {num_hosts}: add --master-addr, the first host's address, on each host"
        )
    port = request.master_port or _number("the port to meet at,", port_text)
    return request, _place(addr, port, index, num_hosts)


def _place(addr: str, port: int, index: int, num_hosts: int) -> Place:
    from thalweg.launch.meeting import Meeting, bind
    from thalweg.launch.peers import Place

    listener = bind(addr, port, several=True) if index == 0 else None
    return Place(index, num_hosts, Meeting(addr, port, index, num_hosts, listener))


def _given(flag: str, value: str | None, name: str, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """An option or the variable in its place, and which of the two to name in an error."""
    return (
        (value, flag)
        if value is not None
        else (environ.get(name) or None, f"{name}=" if name in environ else flag)
    )


def _hosts(name: str, text: str | None) -> int:
    if text is None:
        return 1
    least, colon, most = text.partition(":")
    if colon and least != most:
        raise ValueError(f"{name} {text}: a number of hosts that changes is not built yet; give one number")
    number = _number(name, least)
    if number < 1:
        raise ValueError(f"{name} {text} must be at least 1")
    return number


def _number(name: str, text: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise ValueError(f"{name} {text!r} is not a whole number")
    return int(text)
