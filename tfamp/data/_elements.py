"""What a dataset tells about its elements and their order, mostly without reading one.

To write a dataset as a graph takes 17 s and 4 GiB for 1 GB. So TensorFlow's own objects
are looked at; where a release names their attributes otherwise, nothing is found.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.records.console import progress

# Of a tensor beside its values, by the memory of 300,000 elements in a shuffle: 160 to
# 210 for numbers, of which one or ten make an element, and up to 510 for texts.
_TENSOR_BYTES, _TEXT_TENSOR_BYTES = 200, 300
_READ_AT_ONCE = 1024


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
    is_whole = not isinstance(element, (tuple, list))
    return inputs if is_whole else (inputs, *element[1:])


def named_columns(inputs: Any) -> dict[str, Any]:
    """Returns the columns of inputs by name, a lone tensor under "x", or raises."""
    columns = dict(inputs) if isinstance(inputs, Mapping) else {"x": inputs}
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
    """Returns an element of a spec that holds nothing: zeros, unknown sizes 0."""

    def blank_part(spec: tf.TypeSpec) -> tf.Tensor:
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise TypeError(
                f"Elements hold {spec!r}; expected dense tensors of known rank where "
                f"{purpose}. Set the shape in `.map` (`tf.ensure_shape`), or make the "
                "part dense (`.to_tensor()`)."
            )
        return tf.zeros([size or 0 for size in spec.shape], spec.dtype)

    return tf.nest.map_structure(blank_part, element_spec)


def is_endless(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset is known to have no end."""
    return int(dataset.cardinality()) == int(tf.data.INFINITE_CARDINALITY)


def check_ends(verb: str, dataset: tf.data.Dataset) -> None:
    """Raises if a dataset that a stage has to read whole is known to have no end."""
    if is_endless(dataset):
        raise ValueError(
            f"`.{verb}` got a dataset without end; expected one that ends, to choose "
            "from all of it. Leave `.repeat()` out: `fit` repeats it each epoch."
        )


def known_length(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of elements, None where it is unknown or infinite."""
    cardinality = int(dataset.cardinality())
    return cardinality if cardinality >= 0 else None


def with_length(dataset: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Returns a dataset whose length is told, and checked at the end of a pass."""
    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def with_length_of(like: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose length is known where that of another one is."""
    cardinality = int(like.cardinality())
    is_unknown = cardinality == int(tf.data.UNKNOWN_CARDINALITY)
    return dataset if is_unknown else with_length(dataset, cardinality)


def at_end(
    dataset: tf.data.Dataset,
    action: Callable[[tf.Tensor, tf.Tensor], Any],
    purpose: str,
    keeps: Callable[..., Any] | None = None,
    settings: Any = None,
) -> tf.data.Dataset:
    """Returns what `keeps` is true of; a pass ends by `action(kept, came)`."""
    calls: dict[str, Any] = {}
    if settings is not None:
        calls = {"num_parallel_calls": settings.num_parallel_calls}
        calls["deterministic"] = True
    nothing = blank(dataset.element_spec, purpose=purpose)
    end = tf.data.Dataset.from_tensors((True, True, nothing))
    is_tuple = isinstance(dataset.element_spec, tuple)

    def judge(*parts: Any) -> Any:
        element = parts if is_tuple else parts[0]
        return False, True if keeps is None else keeps(*parts), element

    def look(kept: tf.Tensor, marked: Any) -> Any:
        came, (is_end, _, element) = marked
        done = tf.cond(is_end, lambda: action(kept, came), tf.no_op)
        with tf.control_dependencies([done]):
            return tf.identity(is_end), element

    marked = dataset.map(judge, **calls).concatenate(end).enumerate()
    if keeps is not None:
        marked = marked.filter(lambda number, item: item[1])
    looked = marked.enumerate().map(look)
    kept = looked.filter(lambda is_end, element: tf.logical_not(is_end))
    kept = kept.map(lambda is_end, element: element)
    return with_length_of(dataset, kept) if keeps is None else kept


def attempted(call: Callable[..., Any], element: Any, nothing: Any) -> Any:
    """Returns (True, what a function makes of an element), or (False, nothing).

    tf.data's own `ignore_errors` drops the rest of a source that fails. So the element
    is worked on in a dataset of its own.
    """
    tried = tf.data.Dataset.from_tensors(element).map(
        lambda *parts: (True, call(*parts))
    )
    tried = tried.ignore_errors(log_warning=False)
    failed = tf.data.Dataset.from_tensors((False, nothing))
    return tried.concatenate(failed).take(1).get_single_element()


def message_of(error: BaseException) -> str:
    """Returns the first line of what TensorFlow, or a user's function, raised."""
    text = str(getattr(error, "message", error)).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    first = re.sub(r"^(\{\{[^}]*}} ?|Iterator::Root\S*: )+", "", first)
    first = first.partition(" [Op:")[0]
    return first.removeprefix("assertion failed: [").removesuffix("]").rstrip(".")


def never_empty(dataset: tf.data.Dataset, message: str) -> tf.data.Dataset:
    """Returns a dataset of which a pass that brings nothing is an error."""

    def check(number: tf.Tensor, _: tf.Tensor) -> Any:
        return tf.group(tf.debugging.Assert(number > 0, [message]))

    try:
        return dataset if is_endless(dataset) else at_end(dataset, check, "it ends")
    except TypeError:
        return dataset


def bytes_of_element(element_spec: Any) -> int | None:
    """Returns the size of one element, None where a shape or a size is not known."""
    total = 0
    for spec in tf.nest.flatten(element_spec):
        is_dense = isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string
        num_values = spec.shape.num_elements() if is_dense else None
        if num_values is None or spec.dtype.size is None:
            return None
        total += num_values * spec.dtype.size
    return total


def bytes_held(element_spec: Any) -> int | None:
    """Returns the memory of one element in a buffer, None where that is not known."""
    values, num_tensors = bytes_of_element(element_spec), tf.nest.flatten(element_spec)
    return None if values is None else values + _TENSOR_BYTES * len(num_tensors)


def bytes_of_first(dataset: tf.data.Dataset, count: int) -> int | None:
    """Returns the mean memory of the first elements, None where they cannot be read."""
    total = num_elements = 0
    try:
        for element in dataset.take(count):
            for part in tf.nest.flatten(element, expand_composites=True):
                size = tf.size(part) * (part.dtype.size or 0)
                if part.dtype == tf.string:
                    size = tf.reduce_sum(tf.strings.length(part))
                total += _TEXT_TENSOR_BYTES + int(size)
            num_elements += 1
    except tf.errors.OpError:
        return None  # the pass itself says what is wrong
    return total // num_elements if num_elements else None


def read_all(values: tf.data.Dataset, argument: str) -> np.ndarray:
    """Returns all elements of a dataset, joined, with a progress bar."""
    read, done = [], 0
    with progress(f"Reading for `{argument}`", known_length(values)) as update:
        for batch in values.batch(_READ_AT_ONCE).as_numpy_iterator():
            read.append(batch)
            done += len(batch)
            update(done)
    if not read:
        raise ValueError(
            f"`{argument}` read no elements; expected one at least. Check the files."
        )
    return np.concatenate(read)


def looks_batched(element_spec: Any) -> bool:
    """Whether every part begins with an unknown dimension, as those of batches do."""
    specs = tf.nest.flatten(element_spec)
    shapes = [spec.shape for spec in specs if isinstance(spec, tf.TensorSpec)]
    return bool(shapes) and all(shape.rank and shape[0] is None for shape in shapes)


@dataclasses.dataclass(frozen=True)
class Order:
    """What puts elements in another order in each pass, or process; "" for nothing."""

    varies: str = ""
    differs: str = ""


def order_of(dataset: tf.data.Dataset) -> Order:
    """Returns in how far the elements of a dataset come in one order."""
    varies = differs = ""
    for part in _parts(dataset):
        kind = type(part).__name__
        seeds = [getattr(part, name, None) for name in ("_seed", "_seed2")]
        is_loose = all(seed is not None and int(seed) == 0 for seed in seeds)
        if "Shuffle" in kind:
            if getattr(part, "_reshuffle_each_iteration", True) is not False:
                varies = "a shuffle"
            differs = "a shuffle" if is_loose else differs
        elif "RandomDataset" in kind and is_loose:
            differs = "a random choice"
        if getattr(part, "_deterministic", None) == "false":
            varies = differs = "parallel calls with `deterministic=False`"
    for node in _nodes(dataset):
        if "ShuffleDataset" in node.op:  # whose seeds are told elsewhere in its graph
            differs = "a shuffle in a function"
            if node.attr["reshuffle_each_iteration"].b:
                varies = differs
    return Order(varies, differs)


def runs_python(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has a Python generator in it, which may end for good."""
    return any(node.op == "GeneratorDataset" for node in _nodes(dataset))


def _parts(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for part in getattr(dataset, "_inputs", list)():
        yield from _parts(part)


def _nodes(dataset: tf.data.Dataset) -> Iterator[Any]:
    for part in _parts(dataset):
        for one in getattr(part, "_functions", list)():
            graph = getattr(getattr(one, "function", None), "graph", None)
            if graph is not None:
                definition = graph.as_graph_def()
                yield from definition.node
                for function in definition.library.function:
                    yield from function.node_def
