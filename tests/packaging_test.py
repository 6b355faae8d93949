"""Containers and the recipe for conda: linted, with the requirements of setup.cfg."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfamp
from tfamp.records import checks, versions

ROOT = Path(__file__).parents[1]
CONTAINERS = (ROOT / "Dockerfile", ROOT / "deploy/serving/Dockerfile")
EXTRAS = re.compile(r'"/src\[([\w,]+)\]"')


def settings() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg", encoding="utf-8")
    return parsed


def conda() -> dict:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((ROOT / "conda/recipe.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", CONTAINERS, ids=["training", "serving"])
def test_a_dockerfile_passes_hadolint(file):
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint, of the extra `dev`")
    # DL3013 wants exact versions; tfamp names the ranges that it is tested with.
    command = [hadolint, "--no-color", "--ignore=DL3013", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_container_keeps_the_tensorflow_of_its_image():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    ((major, minor),) = re.findall(
        r"^FROM tensorflow/tensorflow:(\d+)\.(\d+)\.\d+-gpu$", text, re.MULTILINE
    )
    assert f'"tensorflow=={major}.{minor}.*"' in text
    first, last = re.findall(r"2\.(\d+)", versions.SUPPORTED["tensorflow"])
    assert major == "2"
    assert int(first) <= int(minor) <= int(last)
    (extras,) = EXTRAS.findall(text)
    assert set(extras.split(",")) <= set(settings()["options.extras_require"])


def test_the_recipe_for_conda_is_of_this_version_and_its_requirements():
    recipe, package = conda(), settings()
    options, metadata = package["options"], package["metadata"]
    assert recipe["context"]["version"] == tfamp.__version__
    python = f"python{options['python_requires']}"
    wanted = [python, *options["install_requires"].split()]
    run = [line.replace(" ", "") for line in recipe["requirements"]["run"]]
    assert sorted(run) == sorted(wanted)
    assert recipe["requirements"]["host"][0].replace(" ", "") == python
    (entry,) = package["options.entry_points"]["console_scripts"].strip().splitlines()
    assert recipe["build"]["python"]["entry_points"] == [entry]
    about = recipe["about"]
    assert about["homepage"] == about["repository"] == metadata["url"]
    assert about["documentation"] == f"{checks.SITE}/"
    assert about["summary"] == metadata["description"]
    assert about["license"] == metadata["license"]
