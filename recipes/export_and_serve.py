"""Trains a digit reader, exports it, serves it over HTTP, and asks it.

Needs tfamp[serve]; with tfamp[onnx] and the like, `--format=auto` takes the fastest.
Data: scikit-learn's 1,797 digits (8x8), a fifth for test; no network needed.
Command: python recipes/export_and_serve.py
         python recipes/export_and_serve.py --format=onnx --dtype=int8 --keep_serving
Time: 40 s on 2 CPU cores.
Expect: test accuracy of 0.97, the export's verdict, and answers over HTTP that are
those of the model.
"""

import json
import os
import subprocess
import sys
import urllib.request

import keras
import numpy as np
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfamp

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy that it trains under.")
flags.DEFINE_integer("epochs", 15, "Passes over the data.")
flags.DEFINE_string(
    "format", "saved_model", "saved_model, onnx, openvino, litert, auto."
)
flags.DEFINE_string("dtype", "float32", "float32, float16, bfloat16, int8, auto.")
flags.DEFINE_string("path", "digits_exported", "Folder that gets the export.")
flags.DEFINE_integer("port", 0, "Port to serve at; 0 takes a free one.")
flags.DEFINE_boolean("keep_serving", False, "Serve until Ctrl-C.")
flags.DEFINE_boolean("smoke", False, "Two steps, to see that it runs.")


def load():
    """Returns training and test arrays; images are float32 of 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    x, x_test, y, y_test = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return (x, y), (x_test, y_test)


def build(seed=0):
    """Returns the compiled model, training and test data."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((64,), name="image"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax", name="digit"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, *load()


def start_server(path: str, port: int) -> tuple[subprocess.Popen, str]:
    """Starts `tfamp serve`, and returns its process and address once it answers."""
    command = [sys.executable, "-m", "tfamp", "serve", path, f"--port={port}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = server.stdout.readline()  # "Serving at http://127.0.0.1:8000; ..."
    if not line:
        raise RuntimeError(
            f"`{' '.join(command[2:])}` ended with status {server.wait()}; expected a "
            "server. What it wrote stands above."
        )
    return server, line.split("Serving at ")[1].split(";")[0].strip()


def ask(address: str, name: str, images: np.ndarray) -> np.ndarray:
    """Returns what the served model answers, by the Open Inference Protocol v2."""
    url = f"{address}/v2/models/{name}/infer"
    entry = {"name": "image", "datatype": "FP32", "shape": list(images.shape)}
    body = json.dumps({"inputs": [{**entry, "data": images.ravel().tolist()}]})
    print(f"curl -d '{body[:60]}...' {url}")
    with urllib.request.urlopen(url, body.encode(), timeout=30) as answer:
        (output,) = json.load(answer)["outputs"]
    return np.reshape(output["data"], output["shape"])


def main(argv: list[str]) -> None:
    """Trains, exports, serves and asks; ends with a line of JSON."""
    status = tfamp.enable(policy=FLAGS.policy)
    print(f"{status.policy}: {status.reason}")
    model, (x, y), test = build()
    if FLAGS.smoke:
        x, y = x[:64], y[:64]
    model.fit(x, y, epochs=1 if FLAGS.smoke else FLAGS.epochs, verbose=2)
    metrics = model.evaluate(*test, verbose=0, return_dict=True)
    export = tfamp.export(
        model,
        FLAGS.path,
        format=FLAGS.format,
        dtype=FLAGS.dtype,
        calibration=x[:512],
        validation=test,
    )
    print(export)
    server, address = start_server(FLAGS.path, FLAGS.port)
    try:
        found = ask(address, os.path.basename(FLAGS.path), test[0][:8])
        same = found.argmax(axis=1) == model.predict(test[0][:8], verbose=0).argmax(1)
        found = {"policy": status.policy, **metrics, "verdict": export.verdict}
        print(json.dumps({**found, "same_answers": float(same.mean())}), flush=True)
        if FLAGS.keep_serving:
            server.wait()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
