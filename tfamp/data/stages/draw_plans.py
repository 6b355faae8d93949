"""Which examples an epoch takes: positions in random order, by a seed of two ints."""

import tensorflow as tf


def balanced_plan(
    class_ids: tf.Tensor, num_classes: int, num_outputs: int, seed: tf.Tensor
) -> tf.Tensor:
    """Returns positions in which classes come equally often, int64, shuffled.

    Every class gets `num_outputs / num_classes` places, rounded down or up: which
    classes get the places that are left over is drawn. Within a class every member
    comes equally often, up to one, and which come once more is drawn. `class_ids` has
    the class of each example, in [0, `num_classes`); every class has a member.

    Example:
        >>> plan = balanced_plan(tf.constant([0, 0, 0, 0, 1]), 2, 8, [1, 2])
        >>> copies_of(plan, 5).numpy()
        array([1, 1, 1, 1, 4])
    """
    counts = copies_of(class_ids, num_classes)
    turns = _shuffled(tf.range(num_classes, dtype=tf.int64), seed, 0)
    left_over = num_outputs % num_classes
    quotas = num_outputs // num_classes + tf.cast(turns < left_over, tf.int64)
    grouped, classes, ranks = _members(class_ids, counts, seed)
    once_more = ranks < tf.gather(quotas % counts, classes)
    copies = tf.gather(quotas // counts, classes) + tf.cast(once_more, tf.int64)
    return _shuffled(repeated(grouped, copies), seed, 2)


def weighted_plan(
    weights: tf.Tensor, num_outputs: int, seed: tf.Tensor, *, replacement: bool
) -> tf.Tensor:
    """Returns positions drawn in proportion to float64 weights, int64, shuffled.

    With replacement by inverting the cumulative distribution; a weight of 0 is never
    drawn. Without, each draw is in proportion to the weights of those not drawn yet.

    Example:
        >>> weights = tf.constant([0.0, 2.0, 0.0, 1.0], tf.float64)
        >>> plan = weighted_plan(weights, 2, [1, 2], replacement=False)
        >>> sorted(plan.numpy().tolist())
        [1, 3]

    Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir,
    2006, algorithm A; in logarithms, as Gumbel keys, so that no weight underflows.
    """
    if replacement:
        uniform = tf.random.stateless_uniform((num_outputs,), seed, dtype=tf.float64)
        # By the largest, since a sum of large weights may overflow.
        cumulative = tf.cumsum(weights / tf.reduce_max(weights))
        total = cumulative[-1]
        # Below the total even after rounding: the last of equal sums has weight 0.
        below = tf.math.nextafter(total, tf.zeros_like(total))
        points = tf.minimum(uniform * total, below)
        return tf.searchsorted(cumulative, points, side="right", out_type=tf.int64)
    part = tf.random.experimental.stateless_fold_in(seed, 0)
    uniform = tf.random.stateless_uniform(tf.shape(weights), part, dtype=tf.float64)
    keys = tf.math.log(-tf.math.log1p(-uniform)) - tf.math.log(weights)
    # The smallest keys first: the heavy ones, hence the shuffle.
    return _shuffled(tf.cast(tf.argsort(keys)[:num_outputs], tf.int64), seed, 1)


def repeated(rows: tf.Tensor, copies: tf.Tensor) -> tf.Tensor:
    """Returns each of `rows` as often as `copies` says, in order.

    `tf.repeat` takes memory for the most copies of all rows, which for a rare class
    is the number of examples squared.

    Example:
        >>> repeated(tf.constant(["a", "b", "c"]), tf.constant([2, 0, 1])).numpy()
        array([b'a', b'a', b'c'], dtype=object)
    """
    ends = tf.cumsum(tf.cast(copies, tf.int64))
    places = tf.range(tf.reduce_sum(tf.cast(copies, tf.int64)))
    return tf.gather(rows, tf.searchsorted(ends, places, side="right"))


def copies_of(plan: tf.Tensor, num_examples: int) -> tf.Tensor:
    """Returns how often each of `num_examples` comes in a plan, int64.

    Example:
        >>> copies_of(tf.constant([3, 1, 3]), 4).numpy()
        array([0, 1, 0, 2])
    """
    ends = {"minlength": num_examples, "maxlength": num_examples}
    return tf.math.bincount(tf.cast(plan, tf.int32), dtype=tf.int64, **ends)


def stratified_subset(
    class_ids: tf.Tensor, num_classes: int, size: int, seed: tf.Tensor
) -> tf.Tensor:
    """Returns positions of a subset with the proportions of the whole, ascending.

    A class gets its share of `size` rounded down; the places left over go to the
    classes with the largest remainders (Hamilton's method), the first of equal ones.
    Members are drawn uniformly. With one class it is a uniform draw.

    Example:
        >>> ids = tf.constant([0] * 6 + [1] * 3 + [2])
        >>> chosen = stratified_subset(ids, 3, 5, [1, 2])  # 3, 1.5 and 0.5 places
        >>> tf.gather(ids, chosen).numpy()
        array([0, 0, 0, 1, 1], dtype=int32)
    """
    counts = copies_of(class_ids, num_classes)
    num_examples = tf.shape(class_ids, tf.int64)[0]
    shares = counts * size // num_examples
    remainders = counts * size % num_examples
    by_remainder = tf.argsort(remainders, direction="DESCENDING", stable=True)
    num_left = size - tf.reduce_sum(shares)
    extra = tf.range(num_classes, dtype=tf.int64) < num_left
    quotas = shares + tf.scatter_nd(
        by_remainder[:, None], tf.cast(extra, tf.int64), (num_classes,)
    )
    grouped, classes, ranks = _members(class_ids, counts, seed)
    return tf.sort(tf.boolean_mask(grouped, ranks < tf.gather(quotas, classes)))


def _members(
    class_ids: tf.Tensor, counts: tf.Tensor, seed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns positions grouped by class, each one's class, and its rank in that."""
    size = tf.shape(class_ids, tf.int64)[0]
    order = _shuffled(tf.range(size), seed, 1)
    grouped = tf.gather(order, tf.argsort(tf.gather(class_ids, order), stable=True))
    classes = tf.gather(class_ids, grouped)
    starts = tf.cumsum(counts, exclusive=True)
    return grouped, classes, tf.range(size) - tf.gather(starts, classes)


def _shuffled(values: tf.Tensor, seed: tf.Tensor, part: int) -> tf.Tensor:
    """Returns values in an order that a part of the seed decides."""
    seed = tf.random.experimental.stateless_fold_in(seed, part)
    return tf.random.experimental.stateless_shuffle(values, seed)
