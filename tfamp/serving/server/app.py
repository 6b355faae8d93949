"""The ASGI application: addresses, the token, bodies within limits, and errors."""

import asyncio
import concurrent.futures
import functools
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio
import orjson
import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import tfamp
from tfamp.records.checks import short_error
from tfamp.serving.server import protocol
from tfamp.serving.server.models import Served
from tfamp.serving.server.protocol import Refusal, quoted, unknown

# A refused body is read to its end, or the client would not see why; no larger one.
_MAX_REFUSED_BYTES = 2**28
_SMALL = 2**15  # JSON below this takes as long as handing it to a thread
# From a tenth of a millisecond, what a small model takes, to ten seconds.
_SECONDS = (*(n * 10.0**e for e in range(-4, 1) for n in (1, 2.5, 5)), 10.0)
_EXAMPLES = tuple(2.0**n for n in range(11))
T = TypeVar("T")


class App:
    """The server as an ASGI application; `application` says what each limit is."""

    def __init__(
        self,
        models: Mapping[str, Served],
        *,
        token: str | None,
        max_body: int,
        max_json: int,
        timeout_seconds: float,
    ) -> None:
        self.models, self.timeout_seconds = models, timeout_seconds
        self._max_body, self._max_json = max_body, max_json
        self._token = None if token is None else f"Bearer {token}".encode()
        # One thread: several would take turns with the event loop, a large body each.
        self._parser = concurrent.futures.ThreadPoolExecutor(1)
        registry = self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)

        def metric(kind: Any, name: str, text: str, *labels: str, **how: Any) -> Any:
            # By the name of a model, "" where a request names none.
            labels = ("model", *labels)
            return kind(f"tfamp_{name}", text, labels, registry=registry, **how)

        histogram = functools.partial(metric, prometheus.Histogram)
        gauge, counter = prometheus.Gauge, prometheus.Counter
        self._requests = metric(counter, "requests", "Answers by status.", "status")
        self._seconds = histogram("request_seconds", "To answer.", buckets=_SECONDS)
        examples = histogram("batch_examples", "Examples a run.", buckets=_EXAMPLES)
        waiting = metric(gauge, "queue_requests", "Requests that wait or are computed.")
        for name, model in models.items():
            model.on_run = examples.labels(name).observe
            own = functools.partial(getattr, model, "num_waiting")
            waiting.labels(name).set_function(own)
        paths = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        self._routes = Starlette(
            routes=[
                *(Route(f"{x}/infer", self._infer, methods=["POST"]) for x in paths),
                *(Route(f"{x}/ready", self._ready) for x in paths),
                *(Route(x, self._metadata) for x in paths),
                Route("/v2/health/live", self._live),
                Route("/v2/health/ready", self._ready),
                Route("/v2", self._server),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=dict.fromkeys((HTTPException, Exception), self._refused),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, and counts the answer."""
        if scope["type"] != "http":  # that the server starts and ends
            await self._routes(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                name, status = scope.get("model", ""), str(message["status"])
                self._requests.labels(name, status).inc()
            await send(message)

        answer: Any = self._routes
        given = dict(scope["headers"]).get(b"authorization", b"")
        is_free = self._token is None or scope["path"].startswith("/v2/health/")
        if not is_free and not hmac.compare_digest(given, self._token or b""):
            text = "Authorization bears no valid token; send 'Bearer' and the server's."
            answer = await self._refused(Request(scope), Refusal(401, text))
        await answer(scope, receive, counted)

    async def _refused(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            error = Refusal(500, f"The server failed: {short_error(error)}")
        message, headers = error.detail, dict(error.headers or {})
        if error.status_code == 401:
            headers["www-authenticate"] = "Bearer"
        if not isinstance(error, Refusal):
            asked = f"{quoted(request.method)} at {quoted(request.url.path)}"
            message = f"There is no {asked}; expected POST at /v2/models/NAME/infer, or"
            message += f" GET at /v2/models/NAME, of {quoted(list(self.models))}."
        # A lone surrogate, which JSON may hold, cannot be written as UTF-8.
        message = message.encode(errors="replace").decode()
        return _json({"error": message}, error.status_code, headers)

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _server(self, request: Request) -> Response:
        about = {"name": "tfamp", "version": tfamp.__version__}
        return _json({**about, "extensions": ["binary_tensor_data"]})

    async def _metrics(self, request: Request) -> Response:
        text = prometheus.generate_latest(self._registry)
        return Response(text, headers={"content-type": prometheus.CONTENT_TYPE_LATEST})

    async def _ready(self, request: Request) -> Response:
        is_one = "name" in request.path_params
        models = [self._named(request)] if is_one else self.models.values()
        ready = all([await each.is_ready() for each in models])
        name = {"name": request.path_params["name"]} if is_one else {}
        return _json({**name, "ready": ready}, 200 if ready else 503)

    async def _metadata(self, request: Request) -> Response:
        model = self._named(request)
        return _json(protocol.metadata(model.name, model.model))

    def _named(self, request: Request) -> Served:
        name = request.path_params["name"]
        if name not in self.models:
            raise unknown("model", name, self.models)
        version = request.path_params.get("version", protocol.VERSION)
        if version != protocol.VERSION:
            raise unknown(f"version of {name!r}", version, [protocol.VERSION])
        request.scope["model"] = name
        return self.models[name]

    async def _infer(self, request: Request) -> Response:
        model, marked = self._named(request), request.headers.get(protocol.HEADER)
        body = await self._body(request, is_json=marked is None)
        start = time.perf_counter()
        if (length := protocol.json_length(body, marked)) > self._max_json:
            raise self._too_large(length, is_json=True)
        asked = await self._beside(
            length, lambda: protocol.read(body, marked, model.model.signature)
        )
        outputs = await model.ask(asked.inputs)
        texts = [outputs[x].size for x, raw in asked.outputs.items() if not raw]
        text, json_length = await self._beside(
            4 * sum(texts), lambda: protocol.write(asked, outputs, model.name)
        )
        self._seconds.labels(model.name).observe(time.perf_counter() - start)
        if json_length is None:
            return Response(text, media_type="application/json")
        headers = {protocol.HEADER: str(json_length)}
        return Response(text, headers=headers, media_type="application/octet-stream")

    async def _beside(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Does what takes long in another thread, so that others are answered."""
        if num_bytes < _SMALL:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._parser, work)

    async def _body(self, request: Request, *, is_json: bool) -> bytes:
        most = min(self._max_body, self._max_json) if is_json else self._max_body
        found = int(request.headers.get("content-length", 0))  # checked by h11
        parts: list[bytes] = []
        read = 0
        try:
            with anyio.fail_after(self.timeout_seconds):
                async for part in request.stream():
                    read += len(part)
                    found = max(read, found)
                    if found > _MAX_REFUSED_BYTES:
                        break
                    if found <= most:
                        parts.append(part)
        except TimeoutError:
            text = f"The body did not come within {self.timeout_seconds:g} s. Send it "
            raise Refusal(408, f"{text}faster, or in parts.", close=True) from None
        except ClientDisconnect:
            raise Refusal(400, "The client went away.") from None
        if found > most:
            raise self._too_large(found, is_json=is_json)
        return b"".join(parts)

    def _too_large(self, found: int, *, is_json: bool) -> Refusal:
        if is_json and found <= self._max_body:
            text = f"The JSON has {found} bytes; expected at most {self._max_json}. "
            text += "Send tensors as bytes behind it, with `binary_data_size` and "
            return Refusal(413, f"{text}the header Inference-Header-Content-Length.")
        text = f"The body has {found} bytes or more; expected at most {self._max_body}."
        return Refusal(413, f"{text} Send fewer examples at once.", close=True)


def _json(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")
