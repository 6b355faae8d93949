"""What a dataset tells about its elements and their order, mostly without reading one.

TensorFlow has no public way to ask a dataset what it is made of but to write it as a
graph, arrays included, which takes 17 s and 4 GiB for 1 GB. So its own objects are
looked at; where a release names their attributes otherwise, nothing is found.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

# Of a tensor beside its values: its shape, its buffer, and their places in memory. By
# the resident memory of 300,000 elements in a shuffle: 160 to 210 for numbers, of which
# one or ten make an element, and up to 510 for texts.
_TENSOR_BYTES = 200
_TEXT_TENSOR_BYTES = 300
# What the only column is called where inputs are one tensor.
TENSOR = "x"
_SHUFFLES = ("ShuffleDataset", "ShuffleDatasetV3", "ShuffleAndRepeatDatasetV2")
_RANDOM = ("RandomDataset", "RandomDatasetV2")


def as_arguments(element: Any) -> tuple[Any, ...]:
    """Returns an element as `Dataset.map` hands it over: a tuple is several."""
    return element if isinstance(element, tuple) else (element,)


def from_arguments(parts: tuple[Any, ...]) -> Any:
    """Returns the element that `Dataset.map` handed to a function as `parts`."""
    return parts[0] if len(parts) == 1 else parts


def inputs_of(element: Any) -> Any:
    """Returns `x` of an element x, (x, y) or (x, y, sample_weight)."""
    return element[0] if isinstance(element, (tuple, list)) else element


def with_inputs(element: Any, inputs: Any) -> Any:
    """Returns the element with other inputs."""
    if isinstance(element, (tuple, list)):
        return (inputs, *element[1:])
    return inputs


def named_columns(inputs: Any) -> dict[str, Any]:
    """Returns the columns of inputs by name, a lone tensor under "x", or raises.

    Example:
        >>> named_columns({"age": 3}), named_columns(7)
        ({'age': 3}, {'x': 7})
    """
    columns = dict(inputs) if isinstance(inputs, Mapping) else {TENSOR: inputs}
    for name, value in columns.items():
        structured = isinstance(value, (Mapping, tuple, list))
        if structured or not isinstance(name, str):
            raise TypeError(
                f"Inputs have a part {name!r} of type {type(value).__name__}; expected "
                "one tensor, or a dict of tensors by name. Map the elements to "
                "`({'name': tensor, ...}, y)` first."
            )
    return columns


def blank(element_spec: Any, *, purpose: str) -> Any:
    """Returns an element of a spec that holds nothing: zeros, unknown sizes 0.

    The purpose is what needs it, for the error where a part is ragged, sparse or of
    unknown rank.
    """

    def blank_part(spec: tf.TypeSpec) -> tf.Tensor:
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise TypeError(
                f"Elements hold {spec!r}; expected dense tensors of known rank where "
                f"{purpose}. Set the shape in `.map` (`tf.ensure_shape`), or make the "
                "part dense (`.to_tensor()`)."
            )
        shape = [size or 0 for size in spec.shape]
        return tf.zeros(shape, spec.dtype)  # of text "", as of every dtype

    return tf.nest.map_structure(blank_part, element_spec)


def known_length(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of elements, None where it is unknown or infinite."""
    cardinality = int(dataset.cardinality())
    return cardinality if cardinality >= 0 else None


def with_length_of(like: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose length is known where that of another one is."""
    cardinality = int(like.cardinality())
    if cardinality == int(tf.data.UNKNOWN_CARDINALITY):
        return dataset
    return with_length(dataset, cardinality)


def with_length(dataset: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Returns a dataset whose length is told, and checked at the end of a pass."""
    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def of_unknown_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of the same elements whose length tf.data does not know."""
    return dataset.filter(lambda *parts: True)


def never_empty(dataset: tf.data.Dataset, message: str) -> tf.data.Dataset:
    """Returns a dataset of which a pass that brings nothing is an error.

    That is a `tf.errors.InvalidArgumentError` with the message. Datasets of which no
    element can be made up, such as ragged ones, are returned as they are.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    is_plain = all(
        isinstance(one, tf.TensorSpec)
        and one.shape.rank is not None
        and one.dtype not in (tf.variant, tf.resource)
        for one in specs
    )
    if is_endless(dataset) or not is_plain:
        return dataset
    end = tf.data.Dataset.from_tensors(
        (True, blank(dataset.element_spec, purpose="a mark ends them"))
    )
    marked = dataset.map(lambda *parts: (False, from_arguments(parts)))

    def check(number: tf.Tensor, marked: Any) -> Any:
        is_end, element = marked
        is_fine = tf.logical_or(number > 0, tf.logical_not(is_end))
        with tf.control_dependencies([tf.debugging.Assert(is_fine, [message])]):
            return tf.identity(is_end), element

    checked = marked.concatenate(end).enumerate().map(check)
    kept = checked.filter(lambda is_end, element: tf.logical_not(is_end))
    return with_length_of(dataset, kept.map(lambda is_end, element: element))


def is_endless(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset is known to have no end."""
    return int(dataset.cardinality()) == int(tf.data.INFINITE_CARDINALITY)


def bytes_of_element(element_spec: Any) -> int | None:
    """Returns the size of one element, None where a shape or a size is not known.

    Example:
        >>> bytes_of_element((tf.TensorSpec((8, 8, 1), tf.uint8),
        ...                   tf.TensorSpec((), tf.int64)))
        72
    """
    total = 0
    for spec in tf.nest.flatten(element_spec):
        if not isinstance(spec, tf.TensorSpec):
            return None
        size = None if spec.dtype == tf.string else spec.dtype.size
        num_values = spec.shape.num_elements()
        if num_values is None or size is None:
            return None
        total += num_values * size
    return total


def bytes_held(element_spec: Any) -> int | None:
    """Returns the memory of one element in a buffer, None where that is not known.

    Example:
        >>> bytes_held({"a": tf.TensorSpec(()), "b": tf.TensorSpec(())})  # 8 of values
        408
    """
    values = bytes_of_element(element_spec)
    if values is None:
        return None
    return values + _TENSOR_BYTES * len(tf.nest.flatten(element_spec))


def bytes_of_first(
    dataset: tf.data.Dataset, count: int, *, beside: int = _TEXT_TENSOR_BYTES
) -> int | None:
    """Returns the mean bytes of the first elements, None where they cannot be read.

    So many stand beside the values of each tensor: by default those of a buffer.
    """
    total = num_elements = 0
    try:
        for element in dataset.take(count):
            parts = tf.nest.flatten(element, expand_composites=True)
            total += sum(beside + _bytes_of_values(part) for part in parts)
            num_elements += 1
    except tf.errors.OpError:
        return None  # the pass itself says what is wrong
    return total // num_elements if num_elements else None


def _bytes_of_values(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return sum(map(len, np.ravel(np.asarray(tensor.numpy(), object))))
    if tensor.dtype in (tf.variant, tf.resource):
        return 0
    return int(tf.size(tensor)) * tensor.dtype.size


def looks_batched(element_spec: Any) -> bool:
    """Whether every part of an element begins with an unknown dimension.

    That is how tf.data types a batch whose last one may be smaller. Labels of
    single examples are scalars, so a labelled dataset rarely looks so by chance.

    Example:
        >>> looks_batched((tf.TensorSpec((None, 8), tf.float32),
        ...                tf.TensorSpec((None,), tf.int64)))
        True
    """
    shapes = [
        spec.shape
        for spec in tf.nest.flatten(element_spec)
        if isinstance(spec, tf.TensorSpec)
    ]
    return bool(shapes) and all(
        shape.rank is not None and shape.rank > 0 and shape[0] is None
        for shape in shapes
    )


@dataclasses.dataclass(frozen=True)
class Order:
    """In how far elements come in one order.

    Attributes:
        varies: What puts them in another order in each pass, "" for nothing found.
        differs: What puts them in another order in each process, as it has no seed.
    """

    varies: str = ""
    differs: str = ""


def order_of(dataset: tf.data.Dataset) -> Order:
    """Returns in how far the elements of a dataset come in one order.

    Example:
        >>> numbers = tf.data.Dataset.range(9)
        >>> order_of(numbers.shuffle(9, seed=1)).varies
        'a shuffle'
        >>> order_of(numbers)
        Order(varies='', differs='')
    """
    order = Order()
    for part in _parts(dataset):
        for found in (_own_order(part), *map(_order_in, _graphs(part))):
            order = Order(order.varies or found.varies, order.differs or found.differs)
    return order


def runs_python(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has a Python generator in it, which may end for good.

    Example:
        >>> spec = tf.TensorSpec((), tf.int32)
        >>> runs_python(tf.data.Dataset.from_generator(list, output_signature=spec))
        True
        >>> runs_python(tf.data.Dataset.range(9))
        False
    """
    return any(
        node.op == "GeneratorDataset"
        for part in _parts(dataset)
        for graph in _graphs(part)
        for node in _nodes(graph)
    )


def _parts(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all that it is made of."""
    rest = [dataset]
    while rest:
        part = rest.pop()
        yield part
        rest += getattr(part, "_inputs", list)()


def _graphs(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the graphs of the functions that a dataset calls itself."""
    for one in getattr(dataset, "_functions", list)():
        graph = getattr(getattr(one, "function", None), "graph", None)
        if graph is not None:
            yield graph.as_graph_def()


def _nodes(graph: Any) -> Iterator[Any]:
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def _own_order(dataset: tf.data.Dataset) -> Order:
    """Returns in how far a dataset itself keeps an order."""
    kind = type(dataset).__name__.lstrip("_")
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    no_seed = all(seed is not None and int(seed) == 0 for seed in seeds)
    if kind in _SHUFFLES:
        varies = getattr(dataset, "_reshuffle_each_iteration", True) is not False
        return Order("a shuffle" if varies else "", "a shuffle" if no_seed else "")
    if kind in _RANDOM:
        return Order("", "a random choice" if no_seed else "")
    if getattr(dataset, "_deterministic", None) == "false":
        found = "parallel calls with `deterministic=False`"
        return Order(found, found)
    return Order()


def _order_in(graph: Any) -> Order:
    """Returns in how far a graph's datasets keep an order."""
    varies = differs = False
    for node in _nodes(graph):
        if node.op in _SHUFFLES:
            varies |= node.attr["reshuffle_each_iteration"].b
            # Behind the dataset and the size of the buffer.
            differs |= all(_value(graph, name) == 0 for name in node.input[2:4])
    return Order("a shuffle" if varies else "", "a shuffle" if differs else "")


def _value(graph: Any, name: str) -> Any:
    """Returns the value of a constant of a graph, None if it is none."""
    base = name.partition(":")[0]
    for node in _nodes(graph):
        if node.name == base and node.op == "Const":
            found = tf.make_ndarray(node.attr["value"].tensor)
            return found.item() if found.size == 1 else None
    return None


def begins_anew(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset that runs Python begins with the same element twice.

    A generator that was called already goes on instead, and what was read is lost.
    """
    both = [next(iter(dataset), None) for _ in range(2)]
    first, again = (tf.nest.flatten(one, expand_composites=True) for one in both)
    return len(first) == len(again) and all(
        np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(first, again, strict=True)
    )
