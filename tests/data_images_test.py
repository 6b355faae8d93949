"""Image folders and decoding: labels, what is ignored, pixels, decoders, errors."""

import io
import itertools
import logging
import re
import struct

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import RAISE, refused_files, write
from tests.refusals import refusals
from tfamp.data.sources.images import folder_source
from tfamp.data.stages.decode import Decode, ImageReader
from tfamp.records import checks

FAST = ["simplejpeg"]


def make_decode(image_size=None, *, key=None, **options):
    """The stage that `.decode` asks for."""
    return Decode(ImageReader(image_size, key=key, **options))


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


def pairs(source, folder):
    return [
        (path.numpy().decode()[len(str(folder)) + 1 :], int(label))
        for path, label in source.dataset(RAISE)
    ]


def test_labels_are_the_sorted_folders(tmp_path):
    fill(tmp_path, "dog/b.png", "dog/a.jpg", "cat/z.PNG", "cat/deep/y.jpeg")
    source = folder_source(tmp_path)
    expected = [("cat/z.PNG", 0), ("cat/deep/y.jpeg", 0), ("dog/a.jpg", 1)]
    assert pairs(source, tmp_path) == [*expected, ("dog/b.png", 1)]
    assert source.class_names == ("cat", "dog")
    assert source.dataset(RAISE).element_spec == (
        tf.TensorSpec((), tf.string),
        tf.TensorSpec((), tf.int32),
    )
    assert int(source.dataset(RAISE).cardinality()) == 4


def test_class_names_give_the_numbers(tmp_path):
    fill(tmp_path, "a/1.png", "b/2.png", "c/3.png")
    source = folder_source(tmp_path, class_names=["c", "a"])
    assert pairs(source, tmp_path) == [("c/3.png", 0), ("a/1.png", 1)]


def test_what_is_no_image_is_ignored_and_counted(tmp_path):
    fill(tmp_path, "a/1.png", "b/2.png", "a/.hidden.png", "b/notes.txt", "top.png")
    fill(tmp_path, ".git/x.png", "a/.thumbs/1.png", "a/README", "b/more.txt")
    source = folder_source(tmp_path)
    assert [name for name, _ in pairs(source, tmp_path)] == ["a/1.png", "b/2.png"]
    what, why = source.explain(None)
    assert what == "2 images, 2 classes"
    assert why == (
        "paths only; ignored 2 .txt files, 1 beside the class folders, 1 hidden, "
        "1 in hidden folders, 1 without extension"
    )


def test_images_without_labels_are_paths(tmp_path):
    fill(tmp_path, "b.png", "a.png", "c/d.png")
    source = folder_source(tmp_path, labels=None)
    found = [path.decode() for path in source.dataset(RAISE).as_numpy_iterator()]
    assert found == [str(tmp_path / name) for name in ("a.png", "b.png", "c/d.png")]
    assert source.locate(2) == str(tmp_path / "c/d.png")


NAMES = {"a.png": "dog", "b.png": "cat", "c.png": "dog"}
GIVEN = {
    "list": ([5, 0, 5], None, [5, 0, 5]),
    "array": (np.array([5, 0, 5]), None, [5, 0, 5]),
    "dict": ({"a.png": 5, "b.png": 0, "c.png": 5}, None, [5, 0, 5]),
    "names": (NAMES, None, [1, 0, 1]),
    "names in an order": (NAMES, ["dog", "cow", "cat"], [0, 2, 0]),
}


@pytest.mark.parametrize("labels, class_names, numbers", GIVEN.values(), ids=GIVEN)
def test_labels_can_be_given(tmp_path, labels, class_names, numbers):
    fill(tmp_path, "a.png", "b.png", "c.png")
    source = folder_source(tmp_path, labels=labels, class_names=class_names)
    paths = ["a.png", "b.png", "c.png"]
    assert pairs(source, tmp_path) == list(zip(paths, numbers, strict=True))
    if 5 in numbers:
        assert source.class_names == ("0", "5")


def test_identity_follows_files_and_labels(tmp_path):
    fill(tmp_path, "a/1.png", "b/2.png")
    identity = folder_source(tmp_path).identity()
    assert folder_source(tmp_path).identity() == identity
    assert folder_source(tmp_path, class_names=["b", "a"]).identity() != identity
    write(tmp_path / "a/1.png", png([[[1, 2, 3]]]) + b"more")
    assert folder_source(tmp_path).identity() != identity


def test_any_image_can_be_read_by_its_position(tmp_path):
    fill(tmp_path, "a/1.png", "a/2.png", "b/3.png")
    source = folder_source(tmp_path)
    paths, labels = source.rows(tf.constant([2, 0]))
    assert [path.decode()[-5:] for path in paths.numpy()] == ["3.png", "1.png"]
    assert labels.numpy().tolist() == [1, 0]
    part = source.part(tf.constant([2, 1]))
    assert part.locate(1) == str(tmp_path / "a/2.png")
    assert [path[-5:] for path in part.paths] == ["3.png", "2.png"]


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
    "`labels` lacks '2.png', which lie there;": (
        "1.png 2.png",
        {"labels": {"1.png": 0}},
    ),
    "`labels` names '3.png', which do not lie there; expected one label": (
        *("1.png", {"labels": {"1.png": 0, "3.png": 0}}),
    ),
    "`labels` holds '0' and 'b'; expected integers alone, or class names": (
        *("1.png 2.png", {"labels": {"1.png": 0, "2.png": "b"}}, TypeError),
    ),
    "`labels` holds the class 'b'; expected one of `class_names`, 'a'.": (
        *("1.png", {"labels": {"1.png": "b"}, "class_names": ["a"]}),
    ),
    "`class_names` is ('a',) and `labels` is list; expected names only where": (
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
    folder_source, REFUSED, lambda names: dict.fromkeys(names.split(), "x")
)


def decode(data, *args, **options):
    return make_decode(*args, **options).function(data).numpy()


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
    decode = make_decode((2, 3), decoder=decoder).function
    mapped = tf.data.Dataset.from_tensors(bitmap(bits, header)).map(decode)
    for read in (lambda: decode(bitmap(bits, header)), lambda: next(iter(mapped))):
        with pytest.raises(tf.errors.InvalidArgumentError, match="BMP with a palette"):
            read()


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


@pytest.mark.quick("crop-simplejpeg")
@pytest.mark.parametrize("decoder", ["tf", *FAST])
@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_a_dataset_of_paths_becomes_pixels_of_one_shape(tmp_path, decoder, fit):
    needs(decoder)
    write(tmp_path / "a/0.jpg", jpeg(smooth(30, 40)))
    write(tmp_path / "a/1.png", png(smooth(50, 20)))
    write(tmp_path / "a/2.jpg", jpeg(smooth(64, 64, 1)[..., :1]))
    source = folder_source(tmp_path)
    stage = make_decode((24, 16), decoder=decoder, fit=fit, reads_files=True)
    dataset = source.dataset(RAISE)
    stage.check(dataset)
    decoded = stage.apply(dataset, RAISE)
    assert decoded.element_spec[0] == tf.TensorSpec((24, 16, 3), tf.uint8)
    plain = make_decode((24, 16), fit=fit, reads_files=True).function
    for number, (pixels, label) in enumerate(decoded):
        eager, _ = plain(source.locate(number), label)
        difference = np.abs(pixels.numpy().astype(int) - eager.numpy())
        assert difference.max() == 0


@pytest.mark.parametrize("decoder", FAST)
def test_a_fast_decoder_is_traced_without_a_word(decoder, caplog, monkeypatch):
    needs(decoder)
    monkeypatch.setattr(logging.getLogger("tensorflow"), "propagate", True)
    dataset = tf.data.Dataset.from_tensors(jpeg(smooth(30, 41)))
    list(make_decode((8, 8), decoder=decoder).apply(dataset, RAISE))
    assert caplog.messages == []


def test_the_fast_decoder_gives_the_same_pixels():
    needs("simplejpeg")
    for seed, quality in itertools.product(range(3), (75, 95)):
        data = jpeg(smooth(150, 200, seed), quality)
        found = decode(data, (160, 128), decoder="simplejpeg")
        np.testing.assert_array_equal(found, decode(data, (160, 128)))


@pytest.mark.quick("tf")
@pytest.mark.parametrize("decoder", ["tf", "simplejpeg"])
def test_images_keep_their_own_sizes_unless_told(decoder):
    needs(decoder)
    dataset = tf.data.Dataset.from_tensors(jpeg(smooth(30, 41)))
    decoded = make_decode(decoder=decoder).apply(dataset, RAISE)
    assert decoded.element_spec.shape.as_list() == [None, None, 3]
    assert next(iter(decoded)).shape == (30, 41, 3)


def test_an_image_in_a_dict_is_found_by_its_key():
    stage = make_decode((4, 4), key="image")
    record = {"image": png(smooth(8, 8)), "id": 7}
    for element in (record, (record, 1)):
        dataset = tf.data.Dataset.from_tensors(element)
        stage.check(dataset)
        spec = stage.apply(dataset, RAISE).element_spec
        first = spec[0] if isinstance(spec, tuple) else spec
        assert first["image"] == tf.TensorSpec((4, 4, 3), tf.uint8)
        assert first["id"] == tf.TensorSpec((), tf.int32)


@pytest.mark.quick("empty-simplejpeg")
@pytest.mark.parametrize("decoder", ["tf", *FAST])
@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: data[:2], lambda data: b""],
    ids=["cut", "two bytes", "empty"],
)
def test_a_damaged_image_is_an_error(decoder, damage):
    needs(decoder)
    data = damage(jpeg(smooth(64, 64)))
    function = make_decode((8, 8), decoder=decoder).function
    dataset = tf.data.Dataset.from_tensors(data).map(function)
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(dataset)


def test_a_file_that_is_no_image_is_named(tmp_path):
    path = write(tmp_path / "notes.jpg", "no pixels")
    stage = make_decode((8, 8), reads_files=True)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(stage.apply(tf.data.Dataset.from_tensors(path), RAISE))
    assert path in str(caught.value)
    assert "is no JPEG, PNG, GIF or BMP; bytes:" in str(caught.value)
    message = f"{path} is no JPEG, PNG, GIF or BMP; bytes: 9"
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        stage.function(path)


NO_IMAGES = {
    "pixels": (
        (np.zeros((8, 8, 3), np.uint8), None),
        "expected a path or the bytes of an image, a scalar string.",
    ),
    "dict": (
        ({"image": "a", "name": "b", "id": 1}, None),
        "`key` is None and elements are dicts of ('image', 'name', 'id'); expected "
        "the name of the image among them. Pass one of ('image', 'name').",
    ),
    "key": (({"image": "a"}, "picture"), "`key` is 'picture' and elements are"),
    "no dict": (("a", "image"), "`key` is 'image' and elements hold"),
    "batch": ((["a", "b"], None), "decode before you batch."),
}
test_elements_without_an_image_are_refused = refusals(
    NO_IMAGES,
    lambda row: make_decode((4, 4), key=row[1]).check(
        tf.data.Dataset.from_tensors(row[0])
    ),
)

WRONG_ARGUMENTS = {
    "one number": (
        {"image_size": 224},
        "`image_size` is 224; expected (height, width)",
        TypeError,
    ),
    "zero": ({"image_size": (8, 0)}, "`image_size` is 0; expected an integer"),
    "channels": ({"channels": 4}, "`channels` is 4; expected 1 or 3."),
    "decoder": ({"decoder": "pil"}, "Unknown `decoder` 'pil'; expected 'tf' or"),
    "method": ({"method": "cubic"}, "Unknown `method` 'cubic'; expected"),
    "no size": ({"fit": "crop"}, "without `image_size`; expected a size to"),
    "OpenCV": (
        {"decoder": "opencv"},
        "Unknown `decoder` 'opencv'; expected 'tf' or 'simplejpeg'.",
    ),
}
test_wrong_arguments_are_refused = refusals(
    WRONG_ARGUMENTS, lambda options: make_decode(**options)
)


def test_a_missing_package_is_named(monkeypatch):
    def refuse(module, *, extra, purpose):
        raise ImportError(f"{purpose} needs {module}")

    monkeypatch.setattr(checks, "require", refuse)
    with pytest.raises(ImportError, match="`decoder='simplejpeg'` needs simplejpeg"):
        make_decode(decoder="simplejpeg")


def test_the_stage_explains_itself():
    dataset = tf.data.Dataset.from_tensors("path")
    setting, reason = make_decode((8, 9), fit="crop").explain(dataset, RAISE)
    assert setting == "tf, 8x9 crop, bilinear, 2 at once"
    assert reason == "uint8, exact; EXIF rotation is not applied"
