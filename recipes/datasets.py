"""Real datasets that need no network, as TensorFlow Datasets builders.

`digits` is scikit-learn's bundled set of handwritten digits, `stdlib_text` the
source files of the Python standard library. Both are written once, as TFRecord
files, to `data_dir()`. `find` resolves a recipe's `--dataset`.
"""

import contextlib
import hashlib
import io
import logging
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

import tfamp

# About 4 MB of text: a minute or two of training reads it once.
MAX_TEXT_BYTES = 4 * 10**6
# Larger files are tables (encodings, HTML entities, pydoc topics), not prose.
MAX_FILE_BYTES = 150_000
_NO_SOURCE_FOLDERS = {
    "__pycache__",
    "encodings",
    "idle_test",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
}


def data_dir() -> Path:
    """Returns where the datasets lie: `TFAMP_DATA_DIR`, or the user's cache folder."""
    if given := os.environ.get("TFAMP_DATA_DIR"):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tfamp" / "datasets"


class Digits(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """1,797 handwritten digits as uint8 images of (8, 8, 1), values 0 to 255.

    scikit-learn's copy has 17 grey levels, 0 to 16. They are spread to 0 to 255
    so that a model for digits takes any other uint8 image dataset as it is. The
    test set is a fifth of each class, 360 images, by a fixed seed.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits,
    UCI Machine Learning Repository, 1998.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "17 grey levels spread to 0..255, a fifth for test."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = spread_grey_levels(digits.images)[..., np.newaxis]
        x_train, x_test, y_train, y_test = train_test_split(
            images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
        )
        return {
            "train": self._generate_examples(x_train, y_train),
            "test": self._generate_examples(x_test, y_test),
        }

    def _generate_examples(
        self, images: np.ndarray, labels: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield key, {"image": image, "label": int(label)}


def _python_config() -> Any:
    return tfds.core.BuilderConfig(name=f"python{platform.python_version()}")


class StdlibText(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The Python standard library's own source files, about 4 MB of text.

    One example is one file: its name and its text. Test folders, generated tables
    and the largest files are left out; a tenth of the files is for validation.
    Which files, and into which split, follows from their names alone, so the same
    Python version gives the same dataset everywhere.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Up to 4 MB, a tenth of the files for validation."}
    # The text differs between Python versions, and so does the folder.
    BUILDER_CONFIGS = [_python_config()]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict(
                {"name": tfds.features.Text(), "text": tfds.features.Text()}
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        root = Path(sysconfig.get_path("stdlib"))
        files = choose_files(root)
        if len(files) < 20:
            raise ValueError(
                f"Found {len(files)} source files in {str(root)!r}; expected the "
                "Python standard library, at least 20. Use a Python that ships its "
                "sources, or another `--dataset`."
            )
        return {
            "train": self._generate_examples(
                root, [f for i, f in enumerate(files) if i % 10 != 9]
            ),
            "validation": self._generate_examples(root, files[9::10]),
        }

    def _generate_examples(
        self, root: Path, names: list[str]
    ) -> Iterator[tuple[str, dict[str, str]]]:
        for name in names:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            yield name, {"name": name, "text": text}


EMBEDDED = {"digits": Digits, "stdlib_text": StdlibText}


def find(name: str) -> Any:
    """Returns the builder of `--dataset`, its data prepared.

    Args:
        name: One of `EMBEDDED`, or any TFDS name.

    Raises:
        ConnectionError: The data has to be downloaded and there is no network;
            said within seconds.
        ValueError: No such dataset.
    """
    if name in EMBEDDED:
        return prepare(EMBEDDED[name], data_dir())
    # Prepares the data, or says in seconds why it cannot.
    tfamp.data.Pipeline.from_tfds(name, "all", as_supervised=False)
    return tfds.builder(name)


def prepare(builder_class: Any, folder: Path) -> Any:
    """Returns an embedded builder with its files written, quietly and once.

    TFDS writes to a folder of its own and renames it at the end, so a run that is
    killed leaves nothing half-written, and of two runs at a time one wins.
    """
    with quiet():
        builder = builder_class(data_dir=str(folder))
        if not builder.is_prepared():
            try:
                builder.download_and_prepare()
            except OSError:
                builder = builder_class(data_dir=str(folder))
                if not builder.is_prepared():
                    raise
    return builder


def spread_grey_levels(images: np.ndarray) -> np.ndarray:
    """Returns images of levels 0 to 16 as uint8 of 0 to 255, rounded to nearest.

    Example:
        >>> spread_grey_levels(np.array([0.0, 1.0, 8.0, 16.0]))
        array([  0,  16, 128, 255], dtype=uint8)
    """
    return np.rint(images * (255 / 16)).astype(np.uint8)


def choose_files(root: Path) -> list[str]:
    """Returns the corpus's files below `root`, in an order that mixes packages.

    Sorted by the hash of their names, and cut where they reach `MAX_TEXT_BYTES`:
    in alphabetical order the cut would drop everything from "m" on.
    """
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _NO_SOURCE_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    chosen, total = [], 0
    for name in names:
        size = (root / name).stat().st_size
        if 0 < size <= MAX_FILE_BYTES and total + size <= MAX_TEXT_BYTES:
            chosen.append(name)
            total += size
    return chosen


def evaluation_split(builder: Any) -> str:
    """Returns the split to measure on: "test", else "validation".

    Raises:
        ValueError: The dataset has neither.
    """
    for split in ("test", "validation"):
        if split in builder.info.splits:
            return split
    raise ValueError(
        f"Dataset {builder.name!r} has the splits {tuple(builder.info.splits)}; "
        "expected 'test' or 'validation' among them. Choose another `--dataset`."
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps TFDS's progress bars, notes and warnings out of a recipe's output."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()
        logger.setLevel(level)
