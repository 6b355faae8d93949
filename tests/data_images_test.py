"""Image folders and decoding: labels, what is ignored, pixels, decoders, errors."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import elements, refused_files, told, write
from tests.refusals import refusals
from tfamp.data import Pipeline


def png(pixels):
    return tf.io.encode_png(np.asarray(pixels, np.uint8)).numpy()


def noise(height, width):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3))
    return pixels.astype(np.uint8)


def fill(folder, *names):
    for name in names:
        write(folder / name, png([[[0, 0, 0]]]))
    return folder


def pairs(folder, **options):
    pipeline = Pipeline.from_images(folder, **options)
    skip = len(str(folder)) + 1
    return [(path.item().decode()[skip:], int(n)) for path, n in elements(pipeline)]


def test_labels_are_the_sorted_folders(tmp_path):
    fill(tmp_path, "dog/b.png", "dog/a.jpg", "cat/z.PNG", "cat/deep/y.jpeg")
    expected = [("cat/z.PNG", 0), ("cat/deep/y.jpeg", 0), ("dog/a.jpg", 1)]
    assert pairs(tmp_path) == [*expected, ("dog/b.png", 1)]
    found = elements(Pipeline.from_images(tmp_path, labels=None))
    assert len(found) == 4 and all(path.dtype.kind in "OS" for path in found)
    dataset = Pipeline.from_images(tmp_path).build()
    assert dataset.element_spec == (
        tf.TensorSpec((), tf.string),
        tf.TensorSpec((), tf.int32),
    )
    assert int(dataset.cardinality()) == 4


def test_what_is_no_image_is_ignored_and_counted(tmp_path):
    fill(tmp_path, "a/1.png", "b/2.png", "a/.hidden.png", "b/notes.txt", "top.png")
    fill(tmp_path, ".git/x.png", "a/.thumbs/1.png", "a/README", "b/more.txt")
    assert [name for name, _ in pairs(tmp_path)] == ["a/1.png", "b/2.png"]
    text = told(Pipeline.from_images(tmp_path))
    assert "2 images, 2 classes" in text
    assert "ignored 6 files and folders" in text


REFUSED = {
    "has no class folders: it has nothing": ("",),
    "has no class folders: it has files such as '1.png' and '2.png'. Expected one "
    "folder of images for each class. Pass `labels=None`": ("1.png 2.png",),
    "which is none; expected a folder. Did you mean '": (
        *("train/1.png", {"paths": "trian"}),
    ),
}
test_wrong_folders_and_labels_are_refused_at_once = refused_files(
    Pipeline.from_images, REFUSED, lambda names: dict.fromkeys(names.split(), "x")
)


def decode(data, *args, **options):
    """Returns the pixels of the bytes of an image."""
    pipeline = Pipeline.from_arrays(np.array([data], object)).decode(*args, **options)
    return next(iter(pipeline.build())).numpy()


def test_an_image_in_a_dict_is_found_by_its_key():
    record = {"image": np.array([png(noise(8, 8))], object), "id": np.array([7])}
    for given in ((record,), (record, np.array([1]))):
        pipeline = Pipeline.from_arrays(*given).decode((4, 4), key="image")
        spec = pipeline.build().element_spec
        first = spec[0] if isinstance(spec, tuple) else spec
        assert first["image"] == tf.TensorSpec((4, 4, 3), tf.uint8)
        assert first["id"] == tf.TensorSpec((), tf.int64)


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "two bytes": lambda data: data[:2],
    # Of bitmaps with a palette TensorFlow takes the numbers for colors.
    "a bitmap": lambda data: b"BM" + data,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_cannot_be_read_ends_the_pass_or_is_named(damage, tmp_path):
    path = write(tmp_path / "1.jpg", damage(tf.io.encode_jpeg(noise(64, 64)).numpy()))
    pipeline = Pipeline.from_images(tmp_path, labels=None).decode((8, 8))
    named = f"{re.escape(path)}: .*Expected an image that can be read"
    if damage is DAMAGE["cut"]:  # TensorFlow's own error, which names no file
        named = "JPEG"
    with pytest.raises(tf.errors.InvalidArgumentError, match=named):
        list(pipeline.build())
    write(tmp_path / "0.jpg", tf.io.encode_jpeg(noise(64, 64)).numpy())
    pipeline = Pipeline.from_images(tmp_path, labels=None).decode((8, 8))
    careful = pipeline.on_error("skip", max_fraction=0.5)
    assert len(list(careful.build())) == 1
    assert [one.where for one in careful.skipped] == [path]
    if damage is not DAMAGE["cut"]:
        text = "is no JPEG, PNG or GIF; bytes: "
        assert careful.skipped[0].message.startswith(text)


REFUSED_IMAGES = {
    "pixels": (lambda: begin(np.zeros((1, 8, 8, 3), np.uint8)), "a path or the bytes"),
    "dict": (lambda: begin({"image": np.array(["a"])}), "`key` None; expected"),
    "channels": (
        lambda: begin(np.array(["a"]), channels=4),
        "`channels` is 4; expected 1 or 3.",
    ),
}


def begin(x, size=(4, 4), **options):
    return Pipeline.from_arrays(x).decode(size, **options).build()


test_wrong_uses_are_refused = refusals(REFUSED_IMAGES)
