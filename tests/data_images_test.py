"""Image folders and decoding: labels, what is ignored, pixels, decoders, errors."""

import io
import itertools
import logging
import struct

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import elements, refused_files, told, write
from tests.refusals import refusals
from tfamp.data import Pipeline

FAST = ["simplejpeg"]


def needs(decoder):
    """Skips a test where a decoder's packages are missing."""
    if decoder != "tf":
        pytest.importorskip("simplejpeg", reason=f"decoder {decoder!r} needs it")


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
    assert pairs(tmp_path, class_names=["dog"]) == [("dog/a.jpg", 0), ("dog/b.png", 0)]
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
    for part in ("2 images, 2 classes", "2 .txt files", "1 hidden,"):
        assert part in text
    assert "1 beside the class folders" in text


def test_labels_can_be_given_or_left_out(tmp_path):
    fill(tmp_path, "b.png", "a.png", "c/d.png")
    names = ["a.png", "b.png", "c/d.png"]
    found = elements(Pipeline.from_images(tmp_path, labels=None))
    assert [path.item().decode() for path in found] == [
        str(tmp_path / n) for n in names
    ]
    for labels in ([5, 0, 5], np.array([5, 0, 5])):
        expected = list(zip(names, [5, 0, 5], strict=True))
        assert pairs(tmp_path, labels=labels) == expected


REFUSED = {
    "has no class folders: it is empty": ("",),
    "has no class folders: it has files such as '1.png' and '2.png'. Expected one "
    "folder of images for each class. Pass `labels=None`": ("1.png 2.png",),
    "b' holds no images; expected at least one file that ends in ('.jpg',": (
        "a/1.png b/notes.txt",
    ),
    "Unknown class 'cast' in `class_names`; expected folders of": (
        *("cats/1.png", {"class_names": ["cast"]}),
    ),
    "`class_names` is ('a', 'a'), with a name twice;": ("", {"class_names": 2 * ["a"]}),
    "`class_names` is 'a'; expected a sequence of names. Pass `class_names=['a']`.": (
        *("", {"class_names": "a"}, TypeError),
    ),
    "`labels` has 2 entries for 1 files; expected as": ("1.png", {"labels": [0, 1]}),
    "`labels` is a list of float64 with shape (1,); expected one integer for": (
        *("1.png", {"labels": [0.5]}, TypeError),
    ),
    "`labels` holds -1; expected class numbers from 0": ("1.png", {"labels": [-1]}),
    "`labels` is a dict; expected 'inferred', None or": (
        *("1.png", {"labels": {"1.png": 0}}, TypeError),
    ),
    "`class_names` is ('a',) and `labels` is not": (
        *("", {"labels": [0], "class_names": ["a"]}),
    ),
    "Unknown `labels` 'infer'; expected 'inferred'.": ("1.png", {"labels": "infer"}),
    "`extensions` is ('png',); expected endings with": ("", {"extensions": ["png"]}),
    "holds no images; expected at least one file": ("notes.txt", {"labels": None}),
    "which does not exist; expected a folder. Did you mean '": (
        *("train/1.png", {"paths": "trian"}),
    ),
    "a.png', a file; expected a folder. Pass the folder": ("a.png", {"paths": "a.png"}),
}

test_wrong_folders_and_labels_are_refused_at_once = refused_files(
    Pipeline.from_images, REFUSED, lambda names: dict.fromkeys(names.split(), "x")
)


def decode(data, *args, **options):
    """Returns the pixels of the bytes of an image."""
    pipeline = Pipeline.from_arrays(np.array([data], object)).decode(*args, **options)
    return next(iter(pipeline.build())).numpy()


def test_pixels_come_as_they_are():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    for data in (png(pixels), bmp(pixels)):
        found = decode(data)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, pixels)


def bmp(pixels):
    PIL = pytest.importorskip("PIL.Image", reason="writes BMP and GIF for the test")
    PIL.fromarray(pixels).save(file := io.BytesIO(), "BMP")
    return file.getvalue()


def test_of_a_gif_the_first_frame_is_read():
    PIL = pytest.importorskip("PIL.Image", reason="writes BMP and GIF for the test")
    frames = [PIL.new("RGB", (4, 3), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    found = decode(file.getvalue())
    np.testing.assert_array_equal(found, np.full((3, 4, 3), (255, 0, 0)))


def bitmap(bits, header):
    """A bitmap of 2 x 2 numbers into a palette, as Windows or OS/2 writes it."""
    info = struct.pack("<IHHHH", 12, 2, 2, 1, bits)
    if header > 12:
        info = struct.pack("<IiiHHIIiiII", 40, 2, 2, 1, bits, 0, 0, 0, 0, 0, 0)
    table = bytes((3 if header == 12 else 4) * 2**bits)
    begin = 14 + len(info) + len(table)
    return struct.pack("<2sIII", b"BM", begin + 8, 0, begin) + info + table + bytes(8)


@pytest.mark.parametrize("decoder", ["tf", *FAST])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("header", [12, 40], ids=["OS/2", "Windows"])
def test_a_bitmap_with_a_palette_is_refused(decoder, bits, header):
    # TensorFlow takes the numbers for colors: the image would be another one.
    needs(decoder)
    with pytest.raises(tf.errors.InvalidArgumentError, match="BMP with a palette"):
        decode(bitmap(bits, header), (2, 3), decoder=decoder)


def test_gray_images_get_three_channels_and_color_one():
    gray = np.arange(12, dtype=np.uint8).reshape(3, 4, 1) * 20
    np.testing.assert_array_equal(decode(png(gray)), np.repeat(gray, 3, axis=2))
    assert decode(png(gray), channels=1).tolist() == gray.tolist()
    color = np.repeat(gray, 3, axis=2)
    assert decode(png(color), channels=1).shape == (3, 4, 1)


def test_resized_values_are_rounded_half_to_even():
    # Halving a 2 x 4 image takes the mean of each 2 x 2 block.
    blocks = np.array([[0, 1, 2, 3], [0, 1, 3, 2]], np.uint8)[..., None]
    # Means 0.5 and 2.5: down to 0 and 2; half up would be 1 and 3.
    found = decode(png(blocks), (1, 2), channels=1)
    assert found.dtype == np.uint8
    assert found[..., 0].tolist() == [[0, 2]]


def test_values_beyond_the_range_are_held_there():
    edge = np.zeros((8, 8, 1), np.uint8)
    edge[:, 4:] = 255
    resized = tf.image.resize(edge, (16, 16), method="bicubic").numpy()
    assert resized.min() < -1 and resized.max() > 256
    found = decode(png(edge), (16, 16), channels=1, method="bicubic")
    np.testing.assert_array_equal(found, np.clip(np.round(resized), 0, 255))


def test_stretching_is_bilinear_between_the_centers_of_pixels():
    pixels = smooth(9, 14)
    found = decode(png(pixels), (6, 11))
    y = np.clip((np.arange(6) + 0.5) * 9 / 6 - 0.5, 0, 8)
    x = np.clip((np.arange(11) + 0.5) * 14 / 11 - 0.5, 0, 13)
    rows = pixels[y.astype(int)] * (1 - y % 1)[:, None, None]
    rows += pixels[np.ceil(y).astype(int)] * (y % 1)[:, None, None]
    expected = rows[:, x.astype(int)] * (1 - x % 1)[:, None]
    expected += rows[:, np.ceil(x).astype(int)] * (x % 1)[:, None]
    # Half a level for the rounding, and float32 against float64.
    assert np.abs(found - expected).max() <= 0.5 + 1e-3


def test_cropping_takes_the_middle_as_keras_does():
    pixels = smooth(40, 100)
    found = decode(png(pixels), (20, 20), fit="crop")
    middle = decode(png(pixels[:, 30:70]), (20, 20))
    np.testing.assert_array_equal(found, middle)


def test_padding_keeps_the_image_whole():
    pixels = np.full((10, 20, 3), 200, np.uint8)
    found = decode(png(pixels), (20, 20), fit="pad")
    assert found[:5].max() == found[15:].max() == 0
    assert found[5:15].min() == 200


def test_antialiasing_smooths():
    stripes = np.zeros((64, 64, 1), np.uint8)
    stripes[:, ::2] = 255
    plain = decode(png(stripes), (9, 9), channels=1)
    smoothed = decode(png(stripes), (9, 9), channels=1, antialias=True)
    assert np.ptp(smoothed.astype(int)) < np.ptp(plain.astype(int))


@pytest.mark.parametrize("decoder", ["tf", *FAST])
@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_a_folder_becomes_pixels_of_one_shape(tmp_path, decoder, fit):
    needs(decoder)
    files = {"0.jpg": jpeg(smooth(30, 40)), "1.png": png(smooth(50, 20))}
    files["2.jpg"] = jpeg(smooth(64, 64, 1)[..., :1])
    for name, data in files.items():
        write(tmp_path / "a" / name, data)
    pipeline = Pipeline.from_images(tmp_path).decode((24, 16), decoder=decoder, fit=fit)
    dataset = pipeline.build()
    assert dataset.element_spec[0] == tf.TensorSpec((24, 16, 3), tf.uint8)
    for (pixels, _), data in zip(dataset, files.values(), strict=True):
        np.testing.assert_array_equal(pixels, decode(data, (24, 16), fit=fit))


def test_the_fast_decoder_gives_the_same_pixels_without_a_word(caplog, monkeypatch):
    needs("simplejpeg")
    monkeypatch.setattr(logging.getLogger("tensorflow"), "propagate", True)
    for seed, quality in itertools.product(range(2), (75, 95)):
        data = jpeg(smooth(150, 200, seed), quality)
        found = decode(data, (160, 128), decoder="simplejpeg")
        np.testing.assert_array_equal(found, decode(data, (160, 128)))
    assert caplog.messages == []


@pytest.mark.parametrize("decoder", ["tf", *FAST])
def test_images_keep_their_own_sizes_unless_told(decoder):
    needs(decoder)
    assert decode(jpeg(smooth(30, 41)), decoder=decoder).shape == (30, 41, 3)


def test_an_image_in_a_dict_is_found_by_its_key():
    record = {"image": np.array([png(smooth(8, 8))], object), "id": np.array([7])}
    for given in ((record,), (record, np.array([1]))):
        pipeline = Pipeline.from_arrays(*given).decode((4, 4), key="image")
        spec = pipeline.build().element_spec
        first = spec[0] if isinstance(spec, tuple) else spec
        assert first["image"] == tf.TensorSpec((4, 4, 3), tf.uint8)
        assert first["id"] == tf.TensorSpec((), tf.int64)


@pytest.mark.parametrize("decoder", ["tf", *FAST])
@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: data[:2], lambda data: b""],
    ids=["cut", "two bytes", "empty"],
)
def test_a_damaged_image_is_an_error(decoder, damage):
    needs(decoder)
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode(damage(jpeg(smooth(64, 64))), (8, 8), decoder=decoder)


@pytest.mark.parametrize("decoder", ["tf", *FAST])
def test_a_file_that_is_no_image_is_named(tmp_path, decoder):
    needs(decoder)
    path = write(tmp_path / "notes.jpg", "no pixels")
    pipeline = Pipeline.from_images(tmp_path, labels=None)
    message = f"{path} is no JPEG, PNG, GIF or BMP; bytes: 9"
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(pipeline.decode((8, 8), decoder=decoder).build())
    assert path in str(caught.value)
    assert "is no JPEG, PNG, GIF or BMP" in str(caught.value)
    careful = pipeline.decode((8, 8)).on_error("skip", max_fraction=1.0)
    assert list(careful.build()) == []
    assert [one.message for one in careful.skipped] == [message]


NO_IMAGES = {
    "pixels": (
        (np.zeros((1, 8, 8, 3), np.uint8), None),
        "expected a path or the bytes of an image, a scalar string.",
    ),
    "dict": (
        ({"image": np.array(["a"]), "id": np.array([1])}, None),
        "`key` is None and elements are dicts of ('image', 'id'); expected the name",
    ),
    "no dict": ((np.array(["a"]), "image"), "`key` is 'image' and elements hold"),
    "batch": ((np.array([["a", "b"]]), None), "decode before you batch."),
}
test_elements_without_an_image_are_refused = refusals(
    NO_IMAGES,
    lambda row: Pipeline.from_arrays(row[0]).decode((4, 4), key=row[1]).build(),
)

WRONG_ARGUMENTS = {
    "one number": (
        {"image_size": 224},
        "`image_size` is 224; expected (height, width)",
        TypeError,
    ),
    "zero": ({"image_size": (8, 0)}, "`image_size` is 0; expected an integer"),
    "channels": ({"channels": 4}, "`channels` is 4; expected 1 or 3."),
    "method": ({"method": "cubic"}, "Unknown `method` 'cubic'; expected"),
    "no size": ({"fit": "crop"}, "without `image_size`; expected a size to"),
    "OpenCV": (
        {"decoder": "opencv"},
        "Unknown `decoder` 'opencv'; expected 'tf' or 'simplejpeg'.",
    ),
}
test_wrong_arguments_are_refused = refusals(
    WRONG_ARGUMENTS,
    lambda options: Pipeline.from_arrays(np.array(["a"])).decode(**options),
)


def test_the_plan_says_how_images_are_read():
    pipeline = Pipeline.from_arrays(np.array(["path"])).decode((8, 9), fit="crop")
    text = told(pipeline)
    assert "tf, 8x9 crop, bilinear" in text
    assert "uint8, exact; EXIF rotation is not applied" in text
