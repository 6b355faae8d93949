"""What is asked: a model of a server, found by its metadata, and one request to it.

Works with every server of the Open Inference Protocol v2: Triton, OVMS, MLServer,
KServe, `tfamp serve`.
"""

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

import numpy as np

from tfamp.serving.runtimes.signature import DATATYPES

# Of the Open Inference Protocol, as NumPy names them: only numbers are drawn.
_DTYPES = {
    name: dtype for dtype, name in DATATYPES.items() if name not in ("BF16", "BYTES")
}
_LOOKUP_SECONDS = 10
# A length for dimensions that a model leaves open.
_LENGTH = 32
PROTOCOLS = ("binary", "json")
_PATH = re.compile(r"/v2/models/([^/:]+)(?:/versions/[^/:]+)?")


class Target(NamedTuple):
    """A model of a server, named by its `label`, and all bytes of a request to it."""

    label: str
    host: str
    port: int
    request: bytes
    protocol: str = "binary"


def find(
    url: str, *, protocol: str | None, batch_size: int, token: str | None = None
) -> Target:
    """Returns what to ask of a server; the arguments are those of `bench_serve`.

    Raises:
        OSError: The server cannot be reached.
        ValueError: The address, or what the server tells of its model, is no use.
    """
    parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(
            f"`url` is {url!r}; expected http://host:port, or an address of a model "
            "such as http://host:8000/v2/models/digits. Correct it."
        )
    head = {} if token is None else {"Authorization": f"Bearer {token}"}
    base = f"http://{parts.netloc}"
    path = parts.path.rstrip("/").removesuffix("/infer")
    found = _PATH.fullmatch(path)
    if found is None:
        raise ValueError(
            f"`url` {url!r} names no model; expected an address such as "
            f"{base}/v2/models/digits. Add the model."
        )
    name = found[1]
    protocol = protocol or "binary"
    inputs = _inputs(base + path, head)
    rng = np.random.default_rng(0)
    arrays = {str(entry["name"]): _drawn(entry, batch_size, rng) for entry in inputs}
    body, length = _body(arrays, inputs, protocol)
    if length is not None:
        head["Inference-Header-Content-Length"] = str(length)
    lines = [
        f"POST {path}/infer HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{key}: {value}" for key, value in head.items()),
    ]
    request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    label = f"{parts.netloc} {name}"
    return Target(label, parts.hostname, parts.port or 80, request, protocol)


def _inputs(address: str, headers: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the inputs of a model by the Open Inference Protocol."""
    what = "the Open Inference Protocol v2"
    found = _metadata(address, headers, what)
    if not isinstance(found.get("inputs"), list):
        raise _useless(address, "it names no inputs", what)
    return list(found["inputs"])


def _metadata(address: str, headers: dict[str, str], what: str) -> dict[str, Any]:
    """Returns the metadata of a model."""
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_LOOKUP_SECONDS) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:200]
        raise ValueError(f"{address} answers {error.code}: {said}") from error
    except (TypeError, ValueError) as error:
        raise _useless(address, error, what) from error
    except (OSError, http.client.HTTPException) as error:
        raise OSError(
            f"{address} cannot be reached: {error}. Start the server, or correct the "
            "address."
        ) from error


def _useless(address: str, why: object, what: str) -> ValueError:
    return ValueError(
        f"{address} tells no metadata of a model ({why}); expected a server of {what}. "
        "Correct the address."
    )


def _drawn(entry: dict[str, Any], batch_size: int, rng: Any) -> np.ndarray:
    if entry["datatype"] not in _DTYPES:
        raise ValueError(
            f"Input {entry['name']!r} is of {entry['datatype']}; expected one of "
            f"{list(_DTYPES)}. Only numbers are drawn."
        )
    first, *rest = (int(length) for length in entry["shape"])
    shape = [_LENGTH if length < 0 else length for length in rest]
    shape = [batch_size if first < 0 else first, *shape]
    dtype = np.dtype(_DTYPES[entry["datatype"]])
    values = rng.normal(size=shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
    return np.asarray(values.astype(dtype))


def _body(
    arrays: dict[str, np.ndarray], entries: list[dict[str, Any]], protocol: str
) -> tuple[bytes, int | None]:
    """Returns the body of a request, and the length of its JSON if bytes follow."""
    tensors, raw = [], b""
    for entry in entries:
        array = arrays[str(entry["name"])]
        tensor = {key: entry[key] for key in ("name", "datatype")}
        tensor["shape"] = list(array.shape)
        if protocol == "binary":
            tensor["parameters"] = {"binary_data_size": array.nbytes}
            raw += array.tobytes()
        else:
            tensor["data"] = array.ravel().tolist()
        tensors.append(tensor)
    content: dict[str, Any] = {"inputs": tensors}
    if protocol == "binary":
        content["parameters"] = {"binary_data_output": True}
    text = json.dumps(content).encode()
    return text + raw, len(text) if raw else None
