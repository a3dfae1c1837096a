"""Serving: an OpenAI-compatible server that one can trust.

The picture.  One *server* process speaks HTTP; each *replica* is a process of its own that holds one engine:

    client ──HTTP──> server: guard → app → requests → pool ──socket──> replica 0: engine process
                                         responses <──┘   └──socket──> replica 1: engine process

- ``http/guard.py`` guards the connection (slow headers, clients that stop reading, too many of them, those amid a TLS
  handshake) and the request (key, host, body size and time).
- ``app.py`` says which path means what; ``openai/requests.py`` what is accepted and what it means to an engine (every
  fault of a client is a 4xx in OpenAI's form, ``errors.py``); ``openai/responses.py`` how the answer looks, whole or
  streamed.
- ``replicas/pool.py`` admits (a bounded queue: beyond it 429 with ``Retry-After``), picks the replica with the least
  outstanding work, tries again elsewhere when a replica died before anything was passed on, replaces it, and counts.
  Whoever stops listening cancels, and cancelling frees the KV blocks.
- ``engine_process.py`` is the engine's side: one thread owns the engine and does nothing but take messages and step;
  a reader and a heartbeat thread stand beside it.  What passes between is JSON, a message a line.
- ``replicas/router.py`` takes the pool's place in a server that forwards to servers on other hosts.

Why processes and not a thread in the server.  A decoding step in eager torch is thousands of short Python
calls, each of which gives up the GIL; every millisecond that HTTP, JSON and tokenizing take in the same
interpreter is a millisecond in which the engine waits for it.  More important: a crash in compiled code or
the kernel's out-of-memory killer then takes one replica, not the address, and a stalled engine cannot
stall ``/health``.  The price is a copy of the tokenizer and some 50 µs a step for the socket.

The invariants:

- Whatever is admitted ends: with a finish reason, an error that says why, or by the client's own leaving.
- The number of sequences outstanding is bounded, and so is each body, header, queue and frame.
- ``/health`` is 200 only while a replica is alive and has either nothing to do or made progress lately.
- No process outlives the server: a replica ends when its socket does, however the server ended.
"""

import sys
import types
from typing import Any


class _CallableModule(types.ModuleType):
    """``thalweg.serve`` is this package and, as in MII, a function: :func:`thalweg.serve.mii.deployment.serve`."""

    def __call__(self, model: str, deployment_name: str | None = None, **options: Any) -> Any:
        """Start a server under a name and return a client; see :func:`thalweg.serve.mii.deployment.serve`."""
        from thalweg.serve.mii.deployment import serve

        return serve(model, deployment_name, **options)


sys.modules[__name__].__class__ = _CallableModule
