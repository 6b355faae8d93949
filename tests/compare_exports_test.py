"""Exports of a comparison: what is asked for, done once, and shown beside others."""

import dataclasses
import importlib.util
import re

import keras
import numpy as np
import pytest

import tfamp
from tests import made_evidence
from tfamp.comparison import exports
from tfamp.comparison.exports import FILE, ExportedModel, Exports
from tfamp.comparison.report.html import to_html
from tfamp.comparison.report.tables import export_rows, export_sentences
from tfamp.comparison.report.text import MAX_LINES, table, to_markdown
from tfamp.comparison.result import Comparison
from tfamp.serving.exports import choosing
from tfamp.serving.exports.request import named
from tfamp.trials import processes, storage
from tfamp.trials.intervals import Interval
from tfamp.trials.run_records import Latency
from tfamp.trials.storage import Job

pytest.importorskip("cloudpickle")
pytest.importorskip("scipy")
L = keras.layers
JOB = Job("t", ("float32", "auto"), (3, 4), 1, keeps_models=True)
INT8 = ExportedModel(
    *("onnx int8 dynamic", "float32", 3, "as good and faster", "It is as good."),
    metric="accuracy",
    float32_metric=0.975,
    exported_metric=0.9722,
    worsening=0.0028,
    bound=0.0049,
    num_examples=1360,
    flipped=3,
    size_bytes=2**20,
    float32_bytes=2**22,
    cold_start_seconds=0.2,
    peak_bytes=70 * 2**20,
    latencies=(Latency(1, 1e-4, 2e-4, 3e-4, 9000.0, 100),),
    speedups={
        "SavedModel, batch 1": Interval(15.0, 14.0, 16.0),
        "best float32 (litert), batch 1": Interval(2.0, 1.9, 2.1),
    },
    kept=("a", "b", "c", "d", "e"),
)
OTHER = dataclasses.replace(
    INT8,
    name="litert float32",
    flipped=0,
    speedups={"best float32 (onnx), batch 1": Interval(0.5, 0.4, 0.6)},
    kept=(),
)
FAILED = ExportedModel(
    "openvino float32", "float32", 3, "failed", error="ValueError: no such <b>"
)


@pytest.fixture
def answers(monkeypatch):
    """Takes the place of the process that exports: what it does, what it was asked."""
    call = {"status": 0, "asked": []}

    class Process:
        def wait(self, timeout=None):
            if call["status"] == "stopped":
                raise KeyboardInterrupt
            return call["status"]

        def terminate(self):
            call["status"] = call["status"] if call["status"] != "stopped" else -15

    def start(module, arguments, log):
        folder, policy, seed, tolerance, *names = arguments
        call["asked"].append((policy, int(seed), float(tolerance), *names))
        log.write_text("notice\nOutOfMemory: no room\n")
        path = log.with_name(FILE)
        done = Exports.from_json(path).models
        new = [dataclasses.replace(INT8, name=n) for n in names[: call.get("does")]]
        Exports((*done, *new)).to_json(path)
        return Process()

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(processes, "close_input", lambda process: None)
    return call


def exported(folder, *names, seeds=(3,)):
    runs = [made_evidence.run("float32", seed) for seed in seeds]
    return exports.exported(folder, JOB, "float32", runs, names, tolerance=0.01)


def with_model(folder):
    storage.model_of(folder, "float32", 3).write_text("model")
    return folder


def test_names_are_those_of_tables():
    names = ["onnx", "onnx int8", "litert int8 static", "saved_model bfloat16"]
    wanted = ("onnx", "float32", ""), ("onnx", "int8", "dynamic")
    found = [(each.format, each.dtype, each.scheme) for each in map(named, names)]
    assert found[:2] == list(wanted)
    assert [each.name for each in map(named, names[2:])] == names[2:]


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (("onxx",), ValueError, "Unknown `exports` 'onxx'"),
        (("onnx int7",), ValueError, "Unknown `exports dtype` 'int7'"),
        (("onnx bfloat16",), ValueError, "Format 'onnx' has no bfloat16"),
        (("openvino int8 dynamic",), ValueError, "has int8 as ('weights', 'static')"),
        (("",), ValueError, "expected a format, and a dtype and a scheme"),
        ((3,), TypeError, "`exports` holds 3; expected names such as 'onnx int8'"),
        (("saved_model",) * 2, ValueError, "Name each once"),
    ],
)
def test_what_cannot_be_exported_is_told_before_training(names, error, text):
    with pytest.raises(error, match=re.escape(text)):
        tfamp.compare("nowhere:build", exports=names)


def test_a_missing_package_is_told_before_training(monkeypatch):
    monkeypatch.setattr(choosing, "missing", lambda format: ("openvino",))
    with pytest.raises(ImportError, match=re.escape("pip install 'tfamp[openvino]'")):
        tfamp.compare("nowhere:build", exports="openvino")


def test_the_model_of_the_first_seed_is_exported(answers, tmp_path):
    with_model(tmp_path)
    found = exported(tmp_path, "onnx float32", "onnx int8 dynamic")
    assert answers["asked"] == [
        ("float32", 3, 0.01, "onnx float32", "onnx int8 dynamic")
    ]
    assert [each.name for each in found] == ["onnx float32", "onnx int8 dynamic"]
    assert exported(tmp_path, "onnx float32", seeds=(4,)) == ()
    assert exported(tmp_path) == ()


def test_what_is_done_is_not_done_again(answers, tmp_path):
    with_model(tmp_path)
    exported(tmp_path, "onnx float32")
    found = exported(tmp_path, "litert float32", "onnx float32")
    assert [asked[3:] for asked in answers["asked"]] == [
        ("onnx float32",),
        ("litert float32",),
    ]
    assert [each.name for each in found] == ["litert float32", "onnx float32"]
    storage.end(tmp_path, is_complete=True)
    assert not storage.model_of(tmp_path, "float32", 3).exists()
    again = exported(tmp_path, "onnx float32", "saved_model float32")
    assert len(answers["asked"]) == 2 and again[0] == found[1]
    assert "the trained model is not there any more" in again[1].error


def test_what_a_process_leaves_when_it_dies_is_shown(answers, tmp_path):
    answers.update(status=1, does=1)
    found = exported(with_model(tmp_path), "onnx float32", "litert float32")
    assert found[0].verdict == "as good and faster"
    assert found[1].verdict == "failed"
    assert found[1].error == (
        "the process ended with status 1 and left no record: OutOfMemory: no room"
    )


def test_ctrl_c_leaves_the_comparison_with_the_exports_that_are_done(answers, tmp_path):
    answers.update(status="stopped", does=1)
    found = exported(with_model(tmp_path), "onnx float32", "litert float32")
    assert [each.error for each in found] == ["", exports.STOPPED]


def made(*exports):
    return made_evidence.evidence(exports=exports)


def test_each_export_is_a_column():
    rows = {row.label: row.values for row in export_rows(made(INT8, OTHER, FAILED))}
    assert rows == {
        "against float32": ("as good and faster", "as good and faster", "failed"),
        "accuracy, exported": ("0.9722 for 0.975", "0.9722 for 0.975", "–"),
        "worse by": ("0.28%, at most 0.49%", "0.28%, at most 0.49%", "–"),
        "predictions flipped": ("3 of 1,360", "0 of 1,360", "–"),
        "p50, batch 1": ("100 us", "100 us", "–"),
        "times SavedModel, batch 1": ("15.00 (14.00 to 16.00)", "–", "–"),
        "times best float32, batch 1": (
            *("2.00 (1.90 to 2.10), litert", "0.50 (0.40 to 0.60), onnx"),
            "–",
        ),
        "size": (*("1.0 MiB, 0.25 of the weights",) * 2, "–"),
        "first answer after": ("200 ms", "200 ms", "–"),
        "peak memory": ("70.0 MiB", "70.0 MiB", "–"),
        "in float32": ("a, b, c and 2 more", "–", "–"),
    }
    assert export_sentences(made(INT8, FAILED)) == (
        "Exported: the model of float32 with seed 3, compared with itself in float32.",
        "openvino float32 could not be exported: ValueError: no such <b>",
    )
    assert export_rows(made()) == () == export_sentences(made())


def test_every_form_of_a_report_shows_them():
    pytest.importorskip("matplotlib")
    found = made(INT8, OTHER, FAILED, dataclasses.replace(INT8, name="onnx int4"))
    text = table(found)
    assert max(map(len, text.splitlines())) <= 110
    page, markdown = to_html(found), to_markdown(found)
    assert len(markdown.splitlines()) <= MAX_LINES
    for form in (text, page, markdown):
        assert all(each.name in form for each in found.exports)
        assert "0.9722 for 0.975" in form and "15.00 (14.00 to 16.00)" in form
    assert "no such &lt;b&gt;" in page and "no such <b>" not in page
    assert '<h2 id="exports">' not in to_html(made_evidence.evidence())
    again = Comparison.from_json(Comparison(**vars(found)).to_json())
    assert again.exports == found.exports


def build():
    """A model that learns digits' parity in no time."""
    model = keras.Sequential([L.Dense(32, activation="relu"), L.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


@pytest.mark.whole("trains in two processes and exports in a third")
@pytest.mark.skipif(
    importlib.util.find_spec("tf2onnx") is None, reason="needs tfamp[onnx]"
)
def test_a_comparison_exports_what_it_trained(tmp_path):
    x = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    found = tfamp.compare(
        *(build, (x, y), (x, y)),
        policies=("float32", "keras:float32"),
        seeds=1,
        exports=("onnx", "onnx int8 static"),
        latency_batch_sizes=(1, 4),
        directory=tmp_path,
    )
    names = [each.name for each in found.exports]
    assert names == ["onnx float32", "onnx int8 static"]
    for each in found.exports:
        assert not each.error
        run = next(run for run in found.runs if run.policy == each.policy)
        # Accuracy in float32 is that of the run: its own weights were exported.
        assert each.float32_metric == pytest.approx(run.final_metrics["accuracy"])
        assert (each.num_examples, each.seed) == (300, 0)
        assert {size.batch_size for size in each.latencies} == {1, 4}
    assert found.exports[0].flipped == 0
    assert not list(tmp_path.glob("*.keras"))
