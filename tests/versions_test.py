"""Which environments are refused, and the message for each."""

import importlib.metadata
import re
import subprocess
import sys
import types

import pytest

from tfamp.records import versions as _versions

GOOD = {"python": "3.12.1", "tensorflow": "2.20.0", "keras": "3.10.0", "numpy": "2.0"}


@pytest.fixture
def environ(tmp_path):
    """An environment without settings, whose home folder is empty."""
    return {"HOME": str(tmp_path)}


PASSING = [
    *[("tensorflow", each) for each in ("2.19.0", "2.19.1", "2.21.0rc1")],
    ("tensorflow", "2.21.7+nv25.3"),
    *[("keras", each) for each in ("3.10.0", "3.15.1", "4.0")],
    *[("python", each) for each in ("3.10.0", "3.13.9")],
]


@pytest.mark.parametrize("package, version", PASSING)
def test_supported_versions_pass(environ, package, version):
    _versions.check_environment(environ, {**GOOD, package: version}, {})


SUPPORTED = {
    "TensorFlow": "2.19 to 2.21. Run `pip install 'tensorflow>=2.19,<2.22'`.",
    "Keras": "3.10 and later. Run `pip install 'keras>=3.10'`.",
    "Python": "3.10 to 3.13. Make an environment with one of these.",
}
OTHERS = [
    *[("TensorFlow", each) for each in ("2.18.1", "2.22.0.dev20260101", None)],
    *[("Keras", each) for each in ("2.15.0", "3.9.2", None)],
    *[("Python", each) for each in ("3.9.18", "3.14.0")],
]


@pytest.mark.parametrize("package, version", OTHERS)
def test_other_versions_are_import_errors(environ, package, version):
    start = f"Found {package} {version}" if version else f"{package} is not installed"
    message = f"{start}; tfamp supports {package} {SUPPORTED[package]}"
    versions = {**GOOD, package.lower(): version}
    with pytest.raises(ImportError, match=re.escape(message)):
        _versions.check_environment(environ, versions, {})


def test_another_backend_in_the_environment_is_an_error(environ):
    message = (
        "KERAS_BACKEND is 'jax'; tfamp needs 'tensorflow'. Set "
        "KERAS_BACKEND=tensorflow before Keras is imported, in a new process."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        _versions.check_environment({**environ, "KERAS_BACKEND": "jax"}, GOOD, {})


def imported_keras(backend):
    """A stand-in for the Keras module that runs on a backend."""
    config = types.SimpleNamespace(backend=lambda: backend)
    return {"keras": types.SimpleNamespace(config=config)}


def test_an_imported_keras_stands_whatever_the_environment_says(environ):
    modules = imported_keras("tensorflow")
    _versions.check_environment({**environ, "KERAS_BACKEND": "jax"}, GOOD, modules)
    message = (
        "Keras is already running on the backend 'jax'; tfamp needs 'tensorflow'. Set "
        "KERAS_BACKEND=tensorflow before Keras is imported, in a new process."
    )
    environ["KERAS_BACKEND"] = "tensorflow"
    with pytest.raises(ValueError, match=re.escape(message)):
        _versions.check_environment(environ, GOOD, imported_keras("jax"))


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow-cpu", "tf-nightly"])
def test_tensorflow_is_found_under_its_other_names(monkeypatch, name):
    def version(distribution):
        if distribution == name:
            return "2.20.1"
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", version)
    versions = _versions.installed_versions()
    assert versions["tensorflow"] == "2.20.1"
    assert versions["keras"] is None


def test_the_check_imports_neither_tensorflow_nor_keras():
    code = (
        "import sys; from tfamp.records import versions; versions.check_environment();"
        "print(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "[]\n"


def test_an_import_that_fails_is_blamed_on_a_keras_that_was_not_tested():
    error = ImportError("cannot import name 'Layer' from 'keras.src'\nmore")
    text = _versions.blame_untested_keras(error, {"keras": "3.99.0"})
    assert "Keras 3.99.0: ImportError: cannot import name 'Layer'" in text
    assert "pip install 'keras==" in text
    tested = {"keras": _versions.TESTED_KERAS[0]}
    assert _versions.blame_untested_keras(error, tested) is None
