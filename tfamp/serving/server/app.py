"""The ASGI application: addresses, limits and errors; the protocols are beside it."""

import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import tfamp
from tfamp.records.checks import short_error
from tfamp.serving.server import open_inference, tf_predict
from tfamp.serving.server.bodies import (
    BYTES,
    TEXT,
    Answer,
    Bodies,
    Headers,
    Held,
    Receive,
    json_answer,
    refused,
)
from tfamp.serving.server.models import Models, Version, log
from tfamp.serving.server.tensors import Refusal, quoted

Scope = Mapping[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_V2 = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/(infer|ready))?/?")
_V1 = re.compile(r"/v1/models/([^/:]+)(?:/versions/([^/:]+))?(:\w+|/metadata)?/?")


class App:
    """The server as an ASGI application.

    Args:
        models: What answers, within their limits.
        token: What requests have to bear; None asks for nothing. Health may always be
            asked, as what asks for it can seldom keep a secret.
    """

    def __init__(self, models: Models, *, token: str | None = None) -> None:
        self.models = models
        self._token = None if token is None else f"Bearer {token}".encode()
        self._bodies = Bodies(models.limits.max_body, models.limits.timeout_seconds)
        self.is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; whatever it holds, with a status and a message."""
        if scope["type"] != "http":
            return
        held = Held()
        try:
            answer = await self._answer(scope, receive, held)
        except Refusal as refusal:
            answer = refused(refusal)
        except RecursionError:
            answer = refused(Refusal(400, "The body is nested too deeply."))
        except Exception as error:
            log.exception("A request failed.")
            answer = refused(Refusal(500, f"The server failed: {short_error(error)}"))
        finally:
            self._bodies.let_go(held)
        self.models.metrics.requests.add((*held.labels, str(answer.status)))
        if held.since is not None:
            seconds = time.perf_counter() - held.since
            self.models.metrics.seconds.observe(held.labels[:2], seconds)
        length = (b"content-length", b"%d" % len(answer.body))
        await send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [*answer.headers, length],
            }
        )
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive, held: Held) -> Answer:
        """Finds what is asked for."""
        path: str = scope["path"]
        if path in ("/v2/health/live", "/v2/health/live/"):
            return json_answer({"live": True})
        if path in ("/v2/health/ready", "/v2/health/ready/"):
            ready = self.models.is_ready and not self.is_stopping
            return json_answer({"ready": ready}, 200 if ready else 503)
        headers = dict(scope["headers"])
        self._check_token(headers)
        if path == "/metrics":
            _check_method(scope, "GET")
            self.models.count_waiting()
            return Answer(200, self.models.metrics.text().encode(), (TEXT,))
        if path in ("/v2", "/v2/"):
            _check_method(scope, "GET")
            extensions = ["binary_tensor_data"]
            about = {"name": "tfamp", "version": tfamp.__version__}
            return json_answer({**about, "extensions": extensions})
        if match := _V2.fullmatch(path):
            held.labels = ("", "", "v2")
            name, number, what = match.groups()
            if what == "infer":
                _check_method(scope, "POST")
                self._named(name, number, held)
                body = await self._bodies.read(headers, receive, held)
                # Only now, as it may have been replaced while the body came.
                return await self._infer(self._named(name, number, held), headers, body)
            _check_method(scope, "GET", f"{path.rstrip('/')}/infer")
            version = self._named(name, number, held)
            if what == "ready":
                return json_answer({"name": name, "ready": True})
            numbers = self.models.numbers(name)
            return json_answer(open_inference.metadata(name, numbers, version.model))
        if match := _V1.fullmatch(path):
            held.labels = ("", "", "v1")
            name, number, what = match.groups()
            if what == ":predict":
                _check_method(scope, "POST")
                self._named(name, number, held)
                body = await self._bodies.read(headers, receive, held)
                return await self._predict(self._named(name, number, held), body)
            if what in (None, "/metadata"):
                _check_method(scope, "GET", f"{path.rstrip('/')}:predict")
                if what is None and number is None:
                    return json_answer(tf_predict.status(self.models.numbers(name)))
                version = self._named(name, number, held)
                if what is None:
                    return json_answer(tf_predict.status([version.number]))
                signature = version.model.signature
                about = tf_predict.metadata(name, version.number, signature)
                return json_answer(about)
        raise Refusal(
            404,
            f"There is nothing at {quoted(path)}; expected /v2/models/NAME/infer, "
            "/v1/models/NAME:predict, /v2/health/ready or /metrics, where NAME is one "
            f"of {quoted(self.models.names)}. Correct the address.",
        )

    def _named(self, name: str, number: str | None, held: Held) -> Version:
        version = self.models.get(name, number)
        held.labels = (version.name, version.number, held.labels[2])
        return version

    def _check_token(self, headers: Headers) -> None:
        if self._token is None:
            return
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, self._token):
            raise Refusal(
                401,
                "The header Authorization bears no valid token; expected 'Bearer' and "
                "the server's token. Send it.",
            )

    async def _infer(self, version: Version, headers: Headers, body: bytes) -> Answer:
        length = headers.get(open_inference.HEADER)
        asked = open_inference.read(body, length, version.model.signature)
        outputs = await self._outputs(version, asked.inputs)
        text, json_length = open_inference.write(
            asked, outputs, version.name, version.number
        )
        if json_length is None:
            return Answer(200, text)
        marked = (open_inference.HEADER, b"%d" % json_length)
        return Answer(200, text, (BYTES, marked))

    async def _predict(self, version: Version, body: bytes) -> Answer:
        asked = tf_predict.read(body, version.model.signature)
        outputs = await self._outputs(version, asked.inputs)
        return Answer(200, tf_predict.write(asked, outputs))

    async def _outputs(self, version: Version, inputs: Any) -> Mapping[str, Any]:
        """Returns what the model answers, or says whose fault it is if it fails."""
        try:
            return await version.batcher.ask(inputs)
        except Refusal:
            raise
        except Exception as error:
            said = short_error(error)
        # The first example tells a model that is broken from inputs that are.
        if version.example is not None:
            try:
                await version.batcher.ask(version.example)
            except Refusal:
                raise
            except Exception as error:
                log.error("Model %r fails: %s", version.name, short_error(error))
                raise Refusal(500, f"Model {version.name!r} fails: {said}") from error
        raise Refusal(
            400,
            f"Model {version.name!r} does not take these inputs: {said}. Compare them "
            "with its metadata.",
        )


def _check_method(scope: Scope, method: str, asks: str | None = None) -> None:
    """Refuses another method; `asks` is where predictions are asked for."""
    found = scope["method"]
    if found != method and (found, method) != ("HEAD", "GET"):
        advice = "Use that one."
        if found == "POST" and asks is not None:
            advice = f"Use that one, or ask for predictions at {quoted(asks)}."
        raise Refusal(
            405, f"The method is {quoted(found)}; expected {method}. {advice}"
        )
