"""What `deploy/serving/` hands to other servers, and the page that tells of it."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.docs_test import CODE
from tests.served_models import Scaled, serving
from tfamp.cli import main as cli
from tfamp.serving.runtimes.signature import TensorSpec

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "serving"
PAGE = ROOT / "docs" / "serving.md"
DEADLINE = 60


def triton():
    """Returns the script, whose folder is no package."""
    spec = importlib.util.spec_from_file_location("triton", FOLDER / "triton.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dependent():
    model = Scaled()
    model.is_by_example = False
    return model


FIXED = TensorSpec("x", (1, 3), "float32")
ONE = TensorSpec("x", (None,), "int64")
TEXTS = TensorSpec("y", (None, None), "string")
CONFIGS = {
    "joins": (Scaled(), [64, [("x", "FP32", [3])], [("y", "FP32", [3])]]),
    "depends on its batch": (
        dependent(),
        [0, [("x", "FP32", [-1, 3])], [("y", "FP32", [-1, 3])]],
    ),
    "texts": (
        Scaled(outputs=(TEXTS,)),
        [64, [("x", "FP32", [3])], [("y", "STRING", [-1])]],
    ),
}


@pytest.mark.parametrize("model, expected", CONFIGS.values(), ids=CONFIGS)
def test_triton_reads_names_dtypes_and_shapes_of_the_signature(model, expected):
    pytest.importorskip("starlette", reason="needs tfamp[serve]")
    pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    text = triton().config(model, "m")
    found = text_format.Parse(text, model_config_pb2.ModelConfig())
    dtype = model_config_pb2.DataType.Name

    def told(tensors):
        return [
            (each.name, dtype(each.data_type).removeprefix("TYPE_"), list(each.dims))
            for each in tensors
        ]

    assert [found.max_batch_size, told(found.input), told(found.output)] == expected
    assert (found.name, found.backend) == ("m", "onnxruntime")
    assert found.HasField("dynamic_batching") == (expected[0] > 0)
    reshaped = [each.HasField("reshape") for each in found.input]
    assert reshaped == [spec.shape == (None,) for spec in model.signature.inputs]


def exported(folder, format="onnx"):
    """Exports the model of the page, and returns it."""
    import keras

    import tfamp

    model = keras.Sequential(
        [keras.Input((4,), name="x"), keras.layers.Dense(3, name="y")]
    )
    tfamp.export(model, folder, format=format)
    return model


def flags_of_serve(capsys):
    """Returns the names of the command's flags."""
    assert cli.main(["serve", "--help"]) == 0
    return set(re.findall(r"--(\w+)", capsys.readouterr().out))


def test_manifests_of_kserve_start_what_there_is(capsys):
    yaml = pytest.importorskip("yaml")

    ours, other = yaml.safe_load_all((FOLDER / "kserve.yaml").read_text())
    (container,) = ours["spec"]["predictor"]["containers"]
    path, *flags = container["args"]
    assert path.partition("=")[2] == "/mnt/models"
    given = dict(flag.removeprefix("--").split("=") for flag in flags)
    assert given.keys() <= flags_of_serve(capsys)
    (port,) = (each["containerPort"] for each in container["ports"])
    assert int(given["port"]) == port == container["readinessProbe"]["httpGet"]["port"]
    assert given["host"] == "0.0.0.0"
    assert other["spec"]["predictor"]["model"]["protocolVersion"] == "v2"


RAY = """
import json, sys, urllib.error, urllib.request
import ray
from ray import serve
from deploy.serving import ray_serve

ray.init(num_cpus=2, include_dashboard=False)
serve.start(http_options={"port": int(sys.argv[2])})
serve.run(ray_serve.app({"paths": sys.argv[1]}))

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    address = f"http://127.0.0.1:{sys.argv[2]}{path}"
    try:
        with urllib.request.urlopen(address, data, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

def rows(shape, data):
    entry = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
    return {"inputs": [entry]}

found = [
    ask("/v2/health/ready"), ask("/v2/models/iris"),
    ask("/v2/models/iris/infer", rows([2, 4], [1, 2, 3, 4, 5, 6, 7, 8.5])),
    ask("/v2/models/iris/infer", rows([1, 1], [1])),
]
serve.shutdown()
ray.shutdown()
print(json.dumps(found))
"""


@pytest.mark.slow("tests/server_protocol_test.py holds the application that it runs")
def test_ray_serve_answers_as_the_server_does(tmp_path):
    pytest.importorskip("ray.serve", reason="needs ray[serve]")
    pytest.importorskip("tf2onnx", reason="needs tfamp[onnx]")
    model = exported(tmp_path / "iris")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", RAY, str(tmp_path / "iris"), str(port)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ready, about, (status, answer), wrong = json.loads(done.stdout.splitlines()[-1])
    assert ready == [200, {"ready": True}]
    assert about[1]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    rows = np.array([[1, 2, 3, 4], [5, 6, 7, 8.5]], np.float32)
    assert status == 200
    found = np.reshape(answer["outputs"][0]["data"], [2, 3])
    np.testing.assert_allclose(found, model(rows), atol=1e-5)
    assert wrong[0] == 400 and "of shape [1, 1]; expected [-1, 4]" in wrong[1]["error"]


def test_the_page_shows_each_way_to_serve(capsys):
    text = PAGE.read_text(encoding="utf-8")
    files = {path.name for path in FOLDER.iterdir() if path.is_file()}
    assert files == set(re.findall(r"\(\.\./deploy/serving/([\w.]+)\)", text))
    for block in CODE.findall(text):
        compile(block, str(PAGE), "exec")
    known = flags_of_serve(capsys)
    told = set(re.findall(r"--([a-z]+_[a-z_]+)", text.partition("## On many")[0]))
    assert told <= known and len(told) > 4


@pytest.mark.slow("test_the_page_shows_each_way_to_serve")
def test_what_the_page_says_runs_from_top_to_bottom(tmp_path, monkeypatch):
    for package in ("starlette", "uvicorn", "tf2onnx", "onnxruntime"):
        pytest.importorskip(package, reason="needs tfamp[serve,onnx]")
    pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```$", text, re.M | re.S)
    names = {"__name__": "__main__"}
    (_, first), (_, start), *rest = blocks
    exec(first, names)
    assert start.splitlines()[-1] == "tfamp serve iris"
    program = (sys.executable, "-m", "tfamp", "serve", tmp_path / "iris", "--port=0")
    with serving(*program) as (_, address):
        for language, block in rest:
            block = block.replace("127.0.0.1:8000", address)
            if language == "python":
                exec(block, names)
                continue
            block = block.replace("tfamp ", f"{sys.executable} -m tfamp ")
            done = subprocess.run(
                ["bash", "-ec", block],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    assert {language for language, _ in rest} == {"python", "bash"}
