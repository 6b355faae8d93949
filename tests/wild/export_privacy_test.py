"""Exporting and loading open no connection, fork no process, write nothing at home."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Written by an audit hook, which a process cannot take off again and its forks inherit.
PROGRAM = """
import os, sys
log = open(sys.argv[1], "a", buffering=1)
WATCHED = ("os.fork", "socket.connect", "socket.getaddrinfo", "urllib.Request")
def hook(event, args):
    if event in WATCHED:
        log.write(f"{event} {args!r}"[:300] + chr(10))
        raise PermissionError("nothing leaves a test")
sys.addaudithook(hook)
import keras, numpy as np, tfamp
folder = sys.argv[2]
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x[:, 0] > 0).astype(int)
model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax")])
"""
USE = """
for format in ("openvino", "onnx"):  # timed beside the others, it loads all of them
    found = tfamp.export(model, f"{folder}/{format}", format=format,
                         validation=(x, y), budget_seconds=0.2, write_failed=True)
    found.load().predict(x)
"""


def test_runtimes_are_used_without_a_word_home(tmp_path):
    pytest.importorskip("openvino")
    pytest.importorskip("openvino_telemetry")
    pytest.importorskip("onnxruntime")
    home, log = tmp_path / "home", tmp_path / "log"
    home.mkdir()
    root = str(Path(__file__).parents[2])
    # Neither as a test nor in continuous integration would NNCF send anything.
    automatic = ("CI", "TF_BUILD", "JENKINS_URL", "NNCF_CI", "NNCF_DEV")
    environ = {k: v for k, v in os.environ.items() if k not in automatic}
    environ |= {"HOME": str(home), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ["PYTHONPATH"] = os.pathsep.join([root, environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + USE, str(log), str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert log.read_text() == ""
    left = [str(file.relative_to(home)) for file in home.rglob("*")]
    # Identifiers and statistics of the runtimes; Keras and Matplotlib keep settings.
    assert [name for name in left if "intel" in name or "Microsoft" in name] == []
