"""Integer exports keep the layers in float32 that integers would spoil, and say why."""

import json
import types

import keras
import numpy as np
import pytest

import tfamp
from tests.int8_test import dense_net, inputs_of, parity, plant
from tfamp.serving.exports import sparing
from tfamp.serving.exports.request import Request
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


@pytest.mark.whole("the search is tested above; each real export takes seconds")
@pytest.mark.parametrize(
    "scheme, kept", [("dynamic", {"d2"}), ("static", {"d1", "d2"})]
)
def test_a_planted_outlier_channel_passes_the_gate_in_onnx(tmp_path, scheme, kept):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    model, x, y = planted()
    found = tfamp.export(
        *(model, tmp_path / "model"),
        format="onnx",
        dtype="int8",
        scheme=scheme,
        calibration=x[:64],
        validation=(x, y),
        tolerance=0.05,
    )
    assert set(found.int8.layers) == kept and "an outlier" in found.kept["d2"]
    assert len(found.int8.evaluations) <= 3 and found.verdict.startswith("as good")
    answers = np.asarray(found.load().predict(x)).argmax(axis=1)
    assert np.mean(answers == y) > 0.95
