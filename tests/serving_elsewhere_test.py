"""What `deploy/serving/` hands to other servers, and the page that tells of it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import tfamp
from tests.docs_test import CODE
from tests.served_models import Scaled, serving
from tfamp.cli import main as cli
from tfamp.serving.runtimes.signature import TensorSpec

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "serving"
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}


TEXTS = TensorSpec("y", (None, None), "string")
ONE, EACH = [("x", "FP32", [3])], [("x", "FP32", [-1, 3])]
CONFIGS = {
    "joins": ({}, [64, ONE, [("y", "FP32", [3])]]),
    "depends on its batch": (
        {"is_by_example": False},
        [0, EACH, [("y", "FP32", [-1, 3])]],
    ),
    "texts": ({"outputs": [TEXTS]}, [64, ONE, [("y", "STRING", [-1])]]),
}


@pytest.mark.parametrize("how, expected", CONFIGS.values(), ids=CONFIGS)
def test_triton_reads_names_dtypes_and_shapes_of_the_signature(how, expected):
    pytest.importorskip("starlette", reason="needs tfamp[serve]")
    pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    # The script's folder is no package.
    spec = importlib.util.spec_from_file_location("triton", FOLDER / "triton.py")
    triton = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(triton)
    text = triton.config(Scaled(**how), "m")
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
import json, socket, sys, urllib.request
import ray
from ray import serve
from deploy.serving import ray_serve

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ray.init(num_cpus=2, include_dashboard=False)
serve.start(http_options={"port": port})
serve.run(ray_serve.app({"paths": sys.argv[1]}))
entry = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [1, 2, 3, 4] * 2}
found = []
for path, body in (("health/ready", None), ("models/iris/infer", {"inputs": [entry]})):
    data = body and json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/{path}", data) as answer:
        found.append(json.load(answer))
serve.shutdown()
ray.shutdown()
print(json.dumps(found))
"""


@pytest.mark.slow("tests/server_test.py holds the application that it runs")
def test_ray_serve_answers_as_the_server_does(tmp_path):
    pytest.importorskip("ray.serve", reason="needs ray[serve]")
    pytest.importorskip("tf2onnx", reason="needs tfamp[onnx]")
    layers = keras.Input((4,), name="x"), keras.layers.Dense(3, name="y")
    model = keras.Sequential(layers)
    tfamp.export(model, tmp_path / "iris", format="onnx")
    command = [sys.executable, "-c", RAY, str(tmp_path / "iris")]
    printed = subprocess.check_output(command, cwd=ROOT, env=ENV, timeout=150)
    ready, answer = json.loads(printed.splitlines()[-1])
    assert ready == {"ready": True}
    found = np.reshape(answer["outputs"][0]["data"], [2, 3])
    wanted = model(np.array([[1, 2, 3, 4]] * 2, np.float32))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_page_shows_each_way_to_serve(capsys):
    files = {path.name for path in FOLDER.iterdir() if path.is_file()}
    assert files == set(re.findall(r"\(\.\./deploy/serving/([\w.]+)\)", PAGE))
    for block in CODE.findall(PAGE):
        compile(block, "serving.md", "exec")
    known = flags_of_serve(capsys)
    told = set(re.findall(r"--([a-z]+_[a-z_]+)", PAGE.partition("## On many")[0]))
    assert told <= known and len(told) > 4


@pytest.mark.slow("test_the_page_shows_each_way_to_serve")
def test_what_the_page_says_runs_from_top_to_bottom(tmp_path, monkeypatch):
    for package in ("starlette", "uvicorn", "tf2onnx", "onnxruntime"):
        pytest.importorskip(package, reason="needs tfamp[serve,onnx]")
    pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```$", PAGE, re.M | re.S)
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
            subprocess.run(["bash", "-ec", block], env=ENV, check=True, timeout=60)
    assert {language for language, _ in rest} == {"python", "bash"}
