"""Integer exports keep the layers in float32 that integers would spoil, and say why."""

import importlib
import json
import types

import keras
import numpy as np
import pytest

import tfamp
from tests.int8_test import dense_net, inputs_of, parity, plant
from tfamp.serving.exports import sparing
from tfamp.serving.exports.request import Request
from tfamp.serving.exports.tracing import trace
from tfamp.serving.runtimes.manifest import Manifest
from tfamp.serving.runtimes.signature import Signature


def planted():
    keras.utils.set_random_seed(1)
    model = dense_net()
    plant(model, "d1", "d2")
    x = inputs_of(model, 700)
    return model, x, model.predict(x, verbose=0).argmax(axis=1)


def test_layers_are_kept_until_the_gate_passes(tmp_path, monkeypatch):
    model, x, y = planted()
    asked = []

    def write(source, request, folder):
        asked.append(set(request.keep))
        manifest = Manifest("onnx", "int8", "static", Signature((), ()), {}, {}, {})
        return sparing.Candidate(request, folder, manifest, 0.0)

    def check(reference, candidate, validation, **options):
        return parity(0.0 if {"d1", "d2"} <= asked[-1] else 0.5)

    monkeypatch.setattr(sparing, "write", write)
    monkeypatch.setattr(sparing, "check_parity", check)
    monkeypatch.setattr(sparing.Candidate, "load", lambda self: None)
    source = types.SimpleNamespace(model=model, sample=x)
    request = Request("onnx", "int8", "static", keep={"head": "a head"})
    chosen, kept = sparing.write_sparing(source, request, tmp_path, validation=(x, y))
    assert list(kept.layers) == ["d2", "d1"] and asked[0] == {"head", "d2", "d1"}
    written = json.loads((chosen.folder / "export.json").read_text())
    assert written["kept"] == {"head": "a head", **kept.layers} == chosen.request.keep
    assert written["plan"]["int8"]["holds"] is True
    # Without validation data nothing is searched, and the request is as it was.
    asked.clear()
    _, none = sparing.write_sparing(source, request, tmp_path, validation=None)
    assert none is None and asked == [{"head"}]


SPOILT = {
    "onnx dynamic": {"d2"},
    "onnx static": {"d1", "d2"},
    "litert dynamic": {"d2"},
    "litert static": {"d1", "d2"},
    "openvino static": {"d1", "d2"},
}
NEEDS = {
    "onnx": ("onnxruntime", "tf2onnx"),
    "litert": ("ai_edge_litert", "ai_edge_quantizer"),
    "openvino": ("openvino", "nncf"),
}


@pytest.mark.whole("the search is tested above; each real export takes seconds")
@pytest.mark.parametrize("how", SPOILT)
def test_a_planted_outlier_channel_passes_the_gate(how, tmp_path):
    format, scheme = how.split()
    for package in NEEDS[format]:
        pytest.importorskip(package)
    model, x, y = planted()
    found = tfamp.export(
        *(model, tmp_path / "model"),
        format=format,
        dtype="int8",
        scheme=scheme,
        calibration=x[:64],
        validation=(x, y),
        tolerance=0.05,
        budget_seconds=0.001,
    )
    assert set(found.int8.layers) == SPOILT[how] and "an outlier" in found.kept["d2"]
    assert len(found.int8.evaluations) <= 3 and found.verdict.startswith("as good")
    answers = np.asarray(found.load().predict(x)).argmax(axis=1)
    assert np.mean(answers == y) > 0.95


@pytest.mark.whole("each quantiser; the anchor is one of them")
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.anchors("litert dynamic")
def test_a_file_leaves_in_float_what_it_is_asked_to(how, tmp_path):
    format, scheme = how.split()
    for package in NEEDS[format]:
        pytest.importorskip(package)
    model, x, y = planted()
    traced = trace(model)
    writer = importlib.import_module(f"tfamp.serving.exports.{format}_files")
    runtime = importlib.import_module(f"tfamp.serving.runtimes.{format}")
    right = []
    for keep in ({}, dict.fromkeys(SPOILT[how], "spoilt")):
        folder = tmp_path / str(len(keep))
        folder.mkdir()
        batches = (traced.by_name(x[:64]),)
        request = Request(format, "int8", scheme, calibration=batches, keep=keep)
        writer.write(traced, folder, request)
        loaded = runtime.load(folder, traced, 1)
        right.append(np.mean(loaded.predict(x).argmax(axis=1) == y))
    assert right[0] < 0.9 and right[1] > 0.95
