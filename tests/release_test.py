"""A release: what is in it, what is said of it, and that it runs outside a clone."""

import configparser
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import tfamp
from tfamp.records import checks, versions

ROOT = Path(__file__).parents[1]
# A clean environment downloads TensorFlow.
INSTALL_SECONDS = 900
PROGRAM = """
import keras, numpy as np, tfamp
tfamp.enable("mixed_bfloat16")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
loss = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0).history["loss"][0]
print(tfamp.__version__, tfamp.__file__, loss)
"""


def settings() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg", encoding="utf-8")
    return parsed


def read_yaml(path: str):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version():
    cited = read_yaml("CITATION.cff")
    metadata = settings()["metadata"]
    assert str(cited["version"]) == tfamp.__version__
    assert cited["license"] == metadata["license"]
    assert cited["repository-code"] == metadata["url"]
    assert f"Documentation = {checks.SITE}/" in metadata["project_urls"]


def test_versions_on_the_page_are_those_that_are_tested():
    page = (ROOT / "docs/versioning.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(): cells
        for line in page.splitlines()
        if (cells := line.split("|"))[1:]
    }
    assert rows["Python"][2].strip() == versions.SUPPORTED["python"]
    assert rows["TensorFlow"][2].strip() == versions.SUPPORTED["tensorflow"]
    assert rows["Keras"][2].strip() == versions.SUPPORTED["keras"]
    assert rows["Keras"][3].strip() == " and ".join(versions.TESTED_KERAS)
    assert f"`{versions.UNTESTED_KERAS}=1`" in page


def package_files() -> set[str]:
    """Returns the files of the package, by their path in the clone."""
    found = (path for path in (ROOT / "tfamp").rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix()
        for path in found
        if "__pycache__" not in path.parts
    }


def test_a_dockerfile_passes_hadolint():
    beside = Path(sys.executable).with_name("hadolint")
    if not beside.exists():
        pytest.skip("needs hadolint, of the extra `dev`")
    # DL3013 wants exact versions; tfamp names the ranges that it is tested with.
    files = (ROOT / "Dockerfile", ROOT / "deploy/serving/Dockerfile")
    command = [beside, "--no-color", "--ignore=DL3013", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_container_keeps_the_tensorflow_of_its_image():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    pattern = r"^FROM tensorflow/tensorflow:2\.(\d+)\.\d+-gpu$"
    (minor,) = re.findall(pattern, text, re.MULTILINE)
    assert f'"tensorflow==2.{minor}.*"' in text
    first, last = re.findall(r"2\.(\d+)", versions.SUPPORTED["tensorflow"])
    assert int(first) <= int(minor) <= int(last)
    (extras,) = re.findall(r'"/src\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= set(settings()["options.extras_require"])


def test_the_recipe_for_conda_is_of_this_version_and_its_requirements():
    recipe, package = read_yaml("conda/recipe.yaml"), settings()
    options, metadata = package["options"], package["metadata"]
    assert recipe["context"]["version"] == tfamp.__version__
    python = f"python{options['python_requires']}"
    wanted = [python, *options["install_requires"].split()]
    run = [line.replace(" ", "") for line in recipe["requirements"]["run"]]
    assert sorted(run) == sorted(wanted)
    (entry,) = package["options.entry_points"]["console_scripts"].strip().splitlines()
    assert recipe["build"]["python"]["entry_points"] == [entry]
    about = recipe["about"]
    assert about["homepage"] == about["repository"] == metadata["url"]
    assert about["documentation"] == f"{checks.SITE}/"
    assert about["license"] == metadata["license"]


def test_files_that_are_no_code_are_data_of_the_package():
    patterns = settings()["options.package_data"]["tfamp"].split()
    package = ROOT / "tfamp"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    others = {ROOT / name for name in package_files() if not name.endswith(".py")}
    assert packed == others


def machine_settings() -> dict[str, str]:
    """Returns the variables that tell pip and TLS of a machine where to go."""
    starts = ("PIP_", "SSL_", "REQUESTS_CA", "HTTP_", "HTTPS_", "NO_PROXY")
    kept = {k: v for k, v in os.environ.items() if k.upper().startswith(starts)}
    return {"PATH": os.defpath, "TF_CPP_MIN_LOG_LEVEL": "2", **kept}


def run(*command: object, cwd: Path) -> str:
    """Runs a command with nothing of the clone in reach; returns what it printed."""
    completed = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        env={"HOME": str(cwd), **machine_settings()},
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def made_environment(folder: Path, *packages: object) -> Path:
    """Returns the programs of a clean environment, with some packages in it.

    Skips where pip reaches no index.
    """
    venv.create(folder, with_pip=True)
    if packages:
        pip = (folder / "bin/python", "-m", "pip", "install", "-q")
        try:
            run(*pip, "--disable-pip-version-check", *packages, cwd=folder)
        except AssertionError as error:
            if "(from versions: none)" in str(error):
                pytest.skip("pip reaches no package index")
            raise
    return folder / "bin"


@pytest.mark.skipif(
    versions.installed_versions()["keras"] != versions.TESTED_KERAS[-1],
    reason="a release is built once a night, with the newest versions",
)
@pytest.mark.slow("test_files_that_are_no_code_are_data_of_the_package")
def test_a_release_is_built_checked_installed_and_trains(tmp_path):
    tools = made_environment(tmp_path / "tools", "build", "twine", "cffconvert")
    run(tools / "cffconvert", "--validate", "-i", ROOT / "CITATION.cff", cwd=tmp_path)
    source = tmp_path / "source"
    # Only what git knows: a build takes along what lies about.
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    # The wheel is built from the source distribution, which so holds what it needs.
    run(tools / "python", "-m", "build", "-q", "-o", tmp_path / "dist", cwd=source)
    version = tfamp.__version__
    wheel = tmp_path / f"dist/tfamp-{version}-py3-none-any.whl"
    archive = tmp_path / f"dist/tfamp-{version}.tar.gz"
    assert {*(tmp_path / "dist").iterdir()} == {wheel, archive}
    run(tools / "twine", "check", "--strict", wheel, archive, cwd=tmp_path)

    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
        about = {name.partition(".dist-info/")[2] for name in file.namelist()}
    assert packed == package_files()
    assert {"METADATA", "licenses/LICENSE"} <= about
    with tarfile.open(archive) as file:
        named = {name.partition("/")[2] for name in file.getnames()}
    said = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md"}
    assert said | package_files() <= named

    clean = made_environment(tmp_path / "clean", wheel)
    found = json.loads(run(clean / "tfamp", "doctor", "--json=-", cwd=tmp_path))
    assert found["versions"]["tfamp"] == version
    shown = run(clean / "python", "-W", "ignore", "-c", PROGRAM, cwd=tmp_path)
    trained, place, loss = shown.split()
    assert trained == version
    assert Path(place).is_relative_to(tmp_path / "clean")
    assert math.isfinite(float(loss))
