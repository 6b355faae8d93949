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


def smooth(height, width, seed=0):
    """An image as smooth as a photo: a few waves of random phase, with some noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / 32
    waves = [
        np.sin(a * x + b * y + c) for a, b, c in rng.normal(size=(6, 3)) * [2, 2, 9]
    ]
    channels = rng.normal(size=(3, 6)) @ np.reshape(waves, (6, -1)) * 25 + 128
    channels += rng.normal(size=channels.shape) * 3
    pixels = channels.T.reshape(height, width, 3)
    return np.clip(np.round(pixels), 0, 255).astype(np.uint8)


def jpeg(pixels, quality=85):
    return tf.io.encode_jpeg(pixels, quality=quality).numpy()


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
    "' holds no images; expected at least one file that ends in ('.jpg',": (
        "a/1.png b/notes.txt",
    ),
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


def test_resized_values_are_rounded_half_to_even():
    # Halving a 2 x 4 image takes the mean of each 2 x 2 block.
    blocks = np.array([[0, 1, 2, 3], [0, 1, 3, 2]], np.uint8)[..., None]
    # Means 0.5 and 2.5: down to 0 and 2; half up would be 1 and 3.
    found = decode(png(blocks), (1, 2), channels=1)
    assert found.dtype == np.uint8
    assert found[..., 0].tolist() == [[0, 2]]


def test_an_image_in_a_dict_is_found_by_its_key():
    record = {"image": np.array([png(smooth(8, 8))], object), "id": np.array([7])}
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
    write(tmp_path / "0.jpg", jpeg(smooth(64, 64)))
    path = write(tmp_path / "1.jpg", damage(jpeg(smooth(64, 64))))
    pipeline = Pipeline.from_images(tmp_path, labels=None).decode((8, 8))
    named = f"{re.escape(path)}: .*Expected an image that can be read"
    with pytest.raises(tf.errors.InvalidArgumentError, match=named):
        list(pipeline.build())
    careful = pipeline.on_error("skip", max_fraction=0.5)
    assert len(list(careful.build())) == 1
    assert [one.where for one in careful.skipped] == [path]
    if damage is not DAMAGE["cut"]:
        text = "is no JPEG, PNG or GIF; bytes: "
        assert careful.skipped[0].message.startswith(text)


REFUSED_IMAGES = {
    "pixels": (lambda: begin(np.zeros((1, 8, 8, 3), np.uint8)), "a path or the bytes"),
    "dict": (lambda: begin({"image": np.array(["a"])}), "`key` None; expected"),
    "no dict": (lambda: begin(np.array(["a"]), key="image"), "`key` 'image'; expected"),
    "channels": (
        lambda: begin(np.array(["a"]), channels=4),
        "`channels` is 4; expected 1 or 3.",
    ),
}


def begin(x, size=(4, 4), **options):
    return Pipeline.from_arrays(x).decode(size, **options).build()


test_wrong_uses_are_refused = refusals(REFUSED_IMAGES)
