"""What is asked: a model of a server, found by its metadata, and one request to it.

Works with every server of the Open Inference Protocol v2: Triton, OVMS, MLServer,
KServe and `tfamp serve`.
"""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

import numpy as np

# Of the Open Inference Protocol, as NumPy names them.
_DTYPES = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
_LOOKUP_SECONDS = 10
# A length for dimensions that a model leaves open.
_LENGTH = 32
PROTOCOLS = ("binary", "json", "predict")


class Target(NamedTuple):
    """A model of a server, and the request that it is asked.

    Args:
        label: How it is called in tables: its address and name.
        host: The server's.
        port: The server's.
        request: All bytes of a request.
    """

    label: str
    host: str
    port: int
    request: bytes


def find(
    url: str, *, protocol: str, batch_size: int, token: str | None = None
) -> Target:
    """Returns what to ask of a server.

    Args:
        url: Of the server, or of one model: "http://host:8000/v2/models/digits".
        protocol: "binary" and "json" are the Open Inference Protocol's, "predict" is
            TensorFlow Serving's REST.
        batch_size: Examples in each request.
        token: What requests bear, if anything.

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
    path = parts.path.rstrip("/")
    if not path.startswith("/v2/models/"):
        raise ValueError(
            f"`url` {url!r} names no model; expected an address such as "
            f"{base}/v2/models/digits. Add the model."
        )
    inputs = _metadata(base + path, head)["inputs"]
    name = path.split("/")[3]
    rng = np.random.default_rng(0)
    arrays = {str(entry["name"]): _drawn(entry, batch_size, rng) for entry in inputs}
    body, length = _body(arrays, inputs, protocol)
    ask = f"/v1/models/{name}:predict" if protocol == "predict" else f"{path}/infer"
    if length is not None:
        head["Inference-Header-Content-Length"] = str(length)
    lines = [
        f"POST {ask} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{key}: {value}" for key, value in head.items()),
    ]
    request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    return Target(f"{parts.netloc} {name}", parts.hostname, parts.port or 80, request)


def _metadata(address: str, headers: dict[str, str]) -> dict[str, Any]:
    """Returns the metadata of a model."""
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_LOOKUP_SECONDS) as answer:
            found = json.load(answer)
        if not isinstance(found.get("inputs"), list):
            raise ValueError("it names no inputs")
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:200]
        raise ValueError(f"{address} answers {error.code}: {said}") from error
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"{address} tells no metadata of a model ({error}); expected a server of "
            "the Open Inference Protocol v2. Correct the address."
        ) from error
    except OSError as error:
        raise OSError(
            f"{address} cannot be reached: {error}. Start the server, or correct the "
            "address."
        ) from error
    return dict(found)


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
    if dtype.kind == "f":
        return np.asarray(rng.normal(size=shape).astype(dtype))
    return np.asarray(rng.integers(0, 2, shape).astype(dtype))


def _body(
    arrays: dict[str, np.ndarray], entries: list[dict[str, Any]], protocol: str
) -> tuple[bytes, int | None]:
    """Returns the body of a request, and the length of its JSON if bytes follow."""
    if protocol == "predict":
        columns = {name: array.tolist() for name, array in arrays.items()}
        return json.dumps({"inputs": columns}).encode(), None
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
