"""A folder of photos' averages, `tfamp serve` in a process of its own, and requests."""

import contextlib
import http.client
import json
import sys

import numpy as np

from tests import served_models
from tests.served_models import DEADLINE

RUN = "\nimport runpy; runpy.run_module('tfamp', run_name='__main__')\n"


def export(folder):
    """Exports a model that answers the mean of each channel of photos of any size."""
    import keras

    import tfamp

    photos = keras.Input((None, None, 3), name="photos")
    means = keras.layers.GlobalAveragePooling2D(name="means")(photos)
    tfamp.export(keras.Model(photos, means), folder, format="onnx")
    return folder


def serving(*arguments, before=None, open_files=None, deadline=DEADLINE):
    """Returns a block with `tfamp serve` and its address, "host:port".

    Args:
        *arguments: Of `tfamp serve`.
        before: Python that the process runs first, such as what makes a machine ill.
        open_files: How many it may have.
        deadline: Seconds after which it is killed in any case.
    """
    started = ["-m", "tfamp"] if before is None else ["-c", before + RUN]
    command = [sys.executable, *started, "serve", *map(str, arguments), "--port=0"]
    if open_files is not None:
        limited = f'ulimit -n {open_files}; exec "$@"'
        command = ["bash", "-c", limited, "bash", *command]
    return served_models.serving(*command, deadline=deadline)


def connect(address):
    return contextlib.closing(http.client.HTTPConnection(address, timeout=DEADLINE))


def in_bytes(x, name="photos"):
    """Returns the headers and the body of a request that carries raw bytes."""
    entry = {"name": name, "datatype": "FP32", "shape": list(x.shape)}
    entry["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [entry]}).encode()
    return {"Inference-Header-Content-Length": str(len(head))}, head + x.tobytes()


def in_json(x, name="photos"):
    """Returns the headers and the body of a request that carries numbers."""
    entry = {"name": name, "datatype": "FP32", "shape": list(x.shape)}
    entry["data"] = np.round(x.ravel().astype(float), 4).tolist()
    body = json.dumps({"inputs": [entry]}).encode()
    return {"Content-Type": "application/json"}, body


def answered(connection, path="/v2/models/photos/infer", body=None, headers=None):
    """Returns the status and the JSON of the answer to a request."""
    method = "GET" if body is None else "POST"
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def numbers(answer):
    """Returns the first output of an answer in JSON as an array."""
    (output,) = answer["outputs"]
    return np.reshape(output["data"], output["shape"])
