"""Reads bitmaps with a palette, whose numbers `tf.io.decode_image` takes for colors."""

import tensorflow as tf

_HEADER_BYTES = 54
# A header of OS/2, with shorter fields and colors of three bytes.
_OLD_HEADER = 12
_FILE_HEADER = 14
_MAX_BITS = 8
_BITS = (1, 4, 8)
# Of red, green and blue in gray, in thousandths: ITU-R BT.601, as libjpeg has them.
_GRAY = (299, 587, 114)


def decode_bmp(data: tf.Tensor, channels: int, name: tf.Tensor) -> tf.Tensor:
    """Returns the pixels `(height, width, channels)` of a bitmap, uint8.

    Args:
        data: The file's bytes, which begin with "BM".
        channels: 1 or 3.
        name: What the bitmap is called in errors.

    Raises:
        InvalidArgumentError: It has a palette, and is compressed, breaks off, or
            holds numbers that the palette lacks.

    Source: Microsoft, Bitmap Storage, learn.microsoft.com, 2026-11-23.
    """
    header = tf.io.decode_raw(tf.strings.substr(data, 0, _HEADER_BYTES), tf.uint8)
    header = tf.concat([header, tf.zeros(_HEADER_BYTES, tf.uint8)], 0)

    def number(at: int, num_bytes: int) -> tf.Tensor:
        parts = tf.cast(header[at : at + num_bytes], tf.int32)
        shifts = tf.range(0, 8 * num_bytes, 8)
        return tf.reduce_sum(tf.bitwise.left_shift(parts, shifts))

    begin, info = number(10, 4), number(14, 4)
    is_old = info == _OLD_HEADER
    old = (number(18, 2), number(20, 2), number(24, 2), 0, 0, 3)
    new = (*map(lambda at: number(at, 4), (18, 22)), number(28, 2))
    new += (number(30, 4), number(46, 4), 4)
    width, height, bits, packing, num_colors, color_bytes = (
        tf.where(is_old, *pair) for pair in zip(old, new, strict=True)
    )

    def with_palette() -> tf.Tensor:
        is_plain = tf.reduce_any(bits == _BITS) & (packing == 0)
        kind = [" is a BMP with ", bits, " bits a pixel and compression ", packing]
        with tf.control_dependencies([_check(is_plain, name, *kind)]):
            count = tf.where(
                num_colors == 0, tf.bitwise.left_shift(1, bits), num_colors
            )
        row_bytes = (width * bits + 31) // 32 * 4
        size = row_bytes * tf.abs(height)
        first = _FILE_HEADER + info
        end = tf.maximum(begin + size, first + count * color_bytes)
        is_whole = (end <= tf.strings.length(data)) & (size > 0) & (count > 0)
        with tf.control_dependencies(
            [_check(is_whole, name, " is a BMP that breaks off")]
        ):
            whole = tf.identity(data)
        table = tf.strings.substr(whole, first, count * color_bytes)
        table = tf.reshape(tf.io.decode_raw(table, tf.uint8), [count, color_bytes])
        palette = table[:, 2::-1]  # it is blue, green, red
        rows = tf.io.decode_raw(tf.strings.substr(whole, begin, size), tf.uint8)
        rows = tf.cast(tf.reshape(rows, [tf.abs(height), row_bytes, 1]), tf.int32)
        numbers = tf.bitwise.right_shift(rows, tf.range(8 - bits, -1, -bits))
        numbers = tf.bitwise.bitwise_and(numbers, tf.bitwise.left_shift(1, bits) - 1)
        numbers = tf.reshape(numbers, [tf.abs(height), -1])[:, :width]
        numbers = tf.cond(height > 0, lambda: numbers[::-1], lambda: numbers)
        is_known = tf.reduce_all(numbers < count)
        wrong = " is a BMP with numbers beyond its palette"
        with tf.control_dependencies([_check(is_known, name, wrong)]):
            pixels = tf.gather(palette, numbers)
        return pixels if channels == 3 else _gray(pixels)

    pixels = tf.cond(
        bits <= _MAX_BITS,
        with_palette,
        lambda: tf.io.decode_image(data, channels, expand_animations=False),
    )
    return tf.ensure_shape(pixels, (None, None, channels))


def _check(is_right: tf.Tensor, *words: tf.Tensor | str) -> tf.Operation:
    """Raises with a sentence of some words where something is wrong."""
    remedy = "; expected a whole one without compression. Write it anew as PNG."
    texts = [
        word if isinstance(word, str) or word.dtype == tf.string else _text(word)
        for word in words
    ]
    return tf.debugging.Assert(is_right, [tf.strings.join([*texts, remedy])])


def _text(number: tf.Tensor) -> tf.Tensor:
    return tf.strings.as_string(number)


def _gray(pixels: tf.Tensor) -> tf.Tensor:
    """Returns the brightness of colors, rounded, with an axis of 1."""
    parts = tf.cast(pixels, tf.int32) * tf.constant(_GRAY)
    total = tf.reduce_sum(parts, axis=-1, keepdims=True)
    return tf.cast((total + 500) // 1000, tf.uint8)
