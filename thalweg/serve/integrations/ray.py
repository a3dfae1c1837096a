"""The server as a Ray Serve application, for those who have a Ray cluster (``pip install 'ray[serve]'``).

    from ray import serve
    from thalweg.serve.integrations.ray import application

    serve.run(application("./my-model", num_replicas=2, ray_actor_options={"num_cpus": 4}, quantize="int8"))

Ray's proxies listen, balance over its replicas and restart them; a replica is an actor with the application
(``app.py``) and, as anywhere, an engine in a process of its own.  So everything behind the address is the
same: OpenAI's API, limits, cancellation, errors, ``/metrics`` of the replica that was asked.
"""

import contextlib
import importlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from thalweg.infer.config import EngineConfig
from thalweg.serve.app import build_app
from thalweg.serve.http.guard import BodyLimits, RequestGuard
from thalweg.serve.openai.requests import load_chat_tokenizer
from thalweg.serve.openai.responses import AppState
from thalweg.serve.replicas.launcher import LOADER, EngineSpec, ProcessLauncher
from thalweg.serve.replicas.pool import PoolLimits, ReplicaPool


def application(
    model: str,
    *,
    name: str | None = None,
    num_replicas: int = 1,
    ray_actor_options: dict[str, Any] | None = None,
    api_keys: Sequence[str] = (),
    max_queue: int = 128,
    loader: str = LOADER,
    **options: Any,
) -> Any:
    """Return a Ray Serve application that serves a Hugging Face model (its directory or name).

    ``name``: what clients call it.  ``num_replicas`` and ``ray_actor_options`` are Ray's; ``options`` are
    fields of :class:`thalweg.infer.EngineConfig`.  ``max_queue``: sequences that may wait in a replica
    beside those that run; beyond, it answers 429.  Without keys only names of this host pass as ``Host``.

    Raises ImportError, naming the cure, without Ray.
    """
    try:
        serve: Any = importlib.import_module("ray.serve")
    except ImportError:
        raise ImportError("Ray Serve is not installed: pip install 'ray[serve]'") from None
    engine = EngineConfig(**options)
    engine_spec = EngineSpec(model, engine, loader)
    limits = PoolLimits(engine.max_num_seqs + max_queue, request_seconds=600.0)
    model_name, keys, apps = name or Path(model.rstrip("/")).name or model, tuple(api_keys), []

    def build() -> ASGIApp:
        apps.append(RayApp(engine_spec, model_name, keys, limits))
        return apps[-1]

    @serve.deployment(
        name="thalweg",
        num_replicas=num_replicas,
        ray_actor_options=ray_actor_options or {},
        max_ongoing_requests=2 * limits.max_outstanding,  # the replica itself says 429
    )
    @serve.ingress(build)
    class Thalweg:
        """The deployment; Ray replaces a replica whose health fails."""

        def check_health(self) -> None:
            """Raise where ``/health`` would not be 200."""
            for app in apps:
                app.check()

    return Thalweg.bind()


class RayApp:
    """An ASGI application that starts its engine when the server around it starts."""

    def __init__(
        self, engine_spec: EngineSpec, model_name: str, api_keys: tuple[str, ...], pool_limits: PoolLimits
    ) -> None:
        self._engine_spec, self._model_name = engine_spec, model_name
        self._api_keys, self._pool_limits = api_keys, pool_limits
        self._lifespan = Router(lifespan=self._serving)
        self._pool: ReplicaPool | None = None
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or follow the server's beginning and end."""
        app = self._lifespan if scope["type"] == "lifespan" else self._app
        assert app is not None, "the server did not say that it starts"
        await app(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _serving(self, _: Any) -> AsyncIterator[None]:
        self._pool = pool = ReplicaPool(ProcessLauncher(self._engine_spec), 1, self._pool_limits)
        model_info = await pool.start()
        spec = self._engine_spec
        tokenizer = load_chat_tokenizer(spec.model, spec.loader, None, spec.options.trust_remote_code)
        app_state = AppState(pool, tokenizer, model_info, self._model_name, int(time.time()))
        self._app = RequestGuard(build_app(app_state), self._api_keys, BodyLimits(), pool.metrics.count_response)
        yield
        await pool.close()

    def check(self) -> None:
        """Raise RuntimeError while the engine is dead or makes no progress."""
        if self._pool is not None:
            healthy, reason = self._pool.health()
            if not healthy:  # Ray asks several times, so an engine that is being started anew has its time
                raise RuntimeError(reason)
