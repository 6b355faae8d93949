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
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import tfamp
from tfamp.records.checks import short_error
from tfamp.serving.server import protocol
from tfamp.serving.server.models import Limits, Served
from tfamp.serving.server.protocol import Refusal, quoted, unknown

# Bodies together may hold so many times the largest of them.
_AT_ONCE = 4
# A refused body is read and thrown away to its end, or the client, which sends it
# still, would not see why it was refused; not one that is larger than this.
_MAX_REFUSED_BYTES = 2**28
# JSON below this takes as long as handing it to a thread.
_SMALL = 2**15
# From a tenth of a millisecond, what a small model takes, to ten seconds.
_SECONDS = (*(n * 10.0**e for e in range(-4, 1) for n in (1, 2.5, 5)), 10.0)
_EXAMPLES = tuple(2.0**n for n in range(11))
T = TypeVar("T")


class App:
    """The server as an ASGI application."""

    def __init__(
        self, models: Mapping[str, Served], limits: Limits, *, token: str | None = None
    ) -> None:
        self.models, self.limits = models, limits
        registry = self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)

        def metric(
            kind: Callable[..., T], name: str, text: str, *labels: str, **how: Any
        ) -> T:
            # By the name of a model, "" where a request names none.
            labels = ("model", *labels)
            return kind(f"tfamp_{name}", text, labels, registry=registry, **how)

        counter, histogram = prometheus.Counter, prometheus.Histogram
        text = "Answers by HTTP status."
        self._requests = metric(counter, "requests", text, "status")
        text = "From the last byte of a request to its answer."
        self._seconds = metric(histogram, "request_seconds", text, buckets=_SECONDS)
        text = "Examples in a run."
        examples = metric(histogram, "batch_examples", text, buckets=_EXAMPLES)
        text = "Requests that wait or are computed."
        waiting = metric(prometheus.Gauge, "queue_requests", text)
        for name, model in models.items():
            model.on_run = examples.labels(name).observe
            of_model = functools.partial(getattr, model, "num_waiting")
            waiting.labels(name).set_function(of_model)
        self._token = None if token is None else f"Bearer {token}".encode()
        self._held_bytes = 0
        # One thread: several would take turns with the event loop, a large body each.
        self._parser = concurrent.futures.ThreadPoolExecutor(1)
        name = "/v2/models/{name}"
        self._routes = Starlette(
            routes=[
                *(
                    Route(f"{each}{end}", answer, methods=[method])
                    for end, answer, method in (
                        ("/infer", self._infer, "POST"),
                        ("/ready", self._model_ready, "GET"),
                        ("", self._metadata, "GET"),
                    )
                    for each in (name, f"{name}/versions/{{version}}")
                ),
                Route("/v2/health/live", self._live),
                Route("/v2/health/ready", self._ready),
                Route("/v2", self._server),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={HTTPException: self._refused, Exception: self._failed},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, and counts the answer."""
        if scope["type"] != "http":
            await self._routes(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                name, status = scope.get("model", ""), str(message["status"])
                self._requests.labels(name, status).inc()
            await send(message)

        given = dict(scope["headers"]).get(b"authorization", b"")
        if (
            self._token is None
            or scope["path"].startswith("/v2/health/")
            or hmac.compare_digest(given, self._token)
        ):
            await self._routes(scope, receive, counted)
            return
        message = "The header Authorization bears no valid token; expected 'Bearer' and"
        refusal = Refusal(401, f"{message} the server's token. Send it.")
        answer = await self._refused(Request(scope), refusal)
        await answer(scope, receive, counted)

    async def _refused(self, request: Request, error: Exception) -> Response:
        """Returns the answer that says what is wrong with a request."""
        if not isinstance(error, HTTPException):
            return await self._failed(request, error)
        message, headers = error.detail, dict(error.headers or {})
        if error.status_code == 401:
            headers["www-authenticate"] = "Bearer"
        elif not isinstance(error, Refusal):
            asked = f"{quoted(request.method)} at {quoted(request.url.path)}"
            message = (
                f"There is no {asked}; expected POST at /v2/models/NAME/infer, or GET "
                "at /v2/models/NAME, /v2/health/ready or /metrics, where NAME is one "
                f"of {quoted(list(self.models))}. Correct the address."
            )
        # A lone surrogate, which JSON may hold, cannot be written as UTF-8.
        message = message.encode(errors="replace").decode()
        return _json({"error": message}, error.status_code, headers)

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Returns the answer to a request on which the server itself failed."""
        return _json({"error": f"The server failed: {short_error(error)}"}, 500)

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        ready = all([await each.is_ready() for each in self.models.values()])
        return _json({"ready": ready}, 200 if ready else 503)

    async def _server(self, request: Request) -> Response:
        about = {"name": "tfamp", "version": tfamp.__version__}
        return _json({**about, "extensions": ["binary_tensor_data"]})

    async def _metrics(self, request: Request) -> Response:
        encoder, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(self._registry), headers={"content-type": kind})

    async def _model_ready(self, request: Request) -> Response:
        model = self._named(request)
        ready = await model.is_ready()
        return _json({"name": model.name, "ready": ready}, 200 if ready else 503)

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
        """Answers a request for predictions."""
        model = self._named(request)
        held: list[int] = []
        try:
            body = await self._body(request, held)
            start = time.perf_counter()
            marked = request.headers.get(protocol.HEADER)
            if (length := protocol.json_length(body, marked)) > self.limits.max_json:
                raise self._too_large(length, is_json=True)
            asked = await self._beside(
                length, lambda: protocol.read(body, marked, model.model.signature)
            )
            outputs = await model.ask(asked.inputs)
            texts = [outputs[x].size for x, raw in asked.outputs.items() if not raw]
            text, json_length = await self._beside(
                4 * sum(texts), lambda: protocol.write(asked, outputs, model.name)
            )
        finally:
            self._held_bytes -= sum(held)
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

    async def _body(self, request: Request, held: list[int]) -> bytes:
        """Returns the body of a request; `held` gets the bytes of its parts."""
        headers, seconds = request.headers, self.limits.timeout_seconds
        coding = headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            text = f"The body is encoded by {quoted(coding)}; expected plain bytes."
            raise Refusal(415, f"{text} Send it without compression.", close=True)
        is_json = protocol.HEADER not in headers
        most = self.limits.max_body
        if is_json:
            most = min(most, self.limits.max_json)
        declared = int(headers.get("content-length", 0))  # checked by h11
        if declared > _MAX_REFUSED_BYTES:
            raise self._too_large(declared, is_json=is_json)
        parts: list[bytes] = []
        found = declared
        read = 0
        try:
            with anyio.fail_after(seconds):
                async for part in request.stream():
                    read += len(part)
                    found = max(read, declared)
                    if found > _MAX_REFUSED_BYTES:
                        break
                    if found <= most:
                        self._hold(len(part), held)
                        parts.append(part)
        except TimeoutError:
            text = f"The body did not come within {seconds:g} s; expected all of it."
            advice = "Send it faster, or in smaller requests."
            raise Refusal(408, f"{text} {advice}", close=True) from None
        except ClientDisconnect:
            raise Refusal(400, "The client went away.") from None
        if found > most:
            raise self._too_large(found, is_json=is_json)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold(self, num_bytes: int, held: list[int]) -> None:
        held.append(num_bytes)
        self._held_bytes += num_bytes
        if self._held_bytes > _AT_ONCE * self.limits.max_body:
            text = "The bodies of all requests together are larger than the server"
            raise Refusal(503, f"{text} holds. Try again.", retry=True, close=True)

    def _too_large(self, found: int, *, is_json: bool) -> Refusal:
        limits = self.limits
        if is_json and found <= limits.max_body:
            return Refusal(
                413,
                f"The JSON has {found} bytes; expected at most {limits.max_json}. Send "
                "tensors as bytes behind it, with `binary_data_size` and the header "
                "Inference-Header-Content-Length, as tritonclient does; or start the "
                "server with a larger --max_json.",
            )
        text = f"The body has {found} bytes or more; expected at most {limits.max_body}"
        return Refusal(413, f"{text}. Send fewer examples at once.", close=True)


def _json(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")
