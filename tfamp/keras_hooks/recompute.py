"""Calls whose gradient computes them again instead of keeping what they made.

Such a call is made a function of its tensors and of the state it reads, so that the
second time gives the same numbers: what it draws, a dropout's mask for example, comes
from the seeds that the first time had, and what it writes, such as moving averages, is
written once. Trainable weights change in between by no step, so they are read again.

Relies on: `StatelessScope` catching what is written and which losses are added; the
call context and the autocast scope being global attributes, which inner layers read;
a graph running its nodes, sorted by depth, in `_run_through_graph`.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import keras
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional
from tensorflow.python.eager import record

from tfamp.keras_hooks import backend
from tfamp.keras_hooks.layers import CALLS
from tfamp.keras_hooks.patches import replaced

# What hangs on a tensor: a mask, its value ahead of a cast, the logits it came from.
_HANGING = ("_keras_mask", "_tfamp_source", "_keras_logits")
_CONTEXT, _AUTOCAST = "current_call_ctx", "autocast_scope"
# Sums of outputs differ by less than that part of the magnitudes where all is the same.
_SAME = 1e-5
# Kinds of operations that a second time would do twice, or otherwise.
_WRITES = ("Assign", "ResourceScatter", "ResourceApply")
_DRAWS = ("Random", "TruncatedNormal", "Multinomial", "ParameterizedTruncatedNormal")
Pack = Callable[[Sequence[Any]], Any]
# Gives what stands for an operation, such as one with `training` filled in.
OperationFn = Callable[[Any], Callable[..., Any]]


class _Results(NamedTuple):
    """What one run came to: output tensors with what hangs on them, and the rest."""

    tensors: list[Any]
    pack: Pack
    updates: list[tuple[Any, Any]]
    losses: list[Any]


def recomputed(
    call: Callable[..., Any],
    *,
    owner: keras.layers.Layer,
    layers: Sequence[keras.layers.Layer],
    name: str,
    is_ready: Callable[[], bool],
    in_xla: Callable[[], bool],
) -> Callable[..., Any]:
    """Returns a function that gives what `call` does; its gradient calls it again.

    `layers` are all that are called inside, of which `owner` gets the losses that are
    added; errors say `name`. `is_ready` states whether all variables inside are made,
    `in_xla` whether XLA compiles what is traced. A ValueError says that the call draws
    random numbers, or writes to variables, past Keras: a second time would do it again.
    """

    def calling(*args: Any, **kwargs: Any) -> Any:
        # Where Keras asks for shapes, or variables are yet to be made, nothing is kept.
        if backend.in_stateless_scope() or not is_ready():
            return call(*args, **kwargs)
        # Those that no gradient is asked for, seeds among them.
        every = ((v, layer) for layer in layers for v in layer.variables)
        fixed = {id(v): v for v, x in every if not (v.trainable and x.trainable)}
        variables = list(fixed.values())
        inputs, pack = _flat((args, kwargs))
        told: list[_Results] = []

        def run(tensors: Sequence[Any], state: Sequence[Any]) -> _Results:
            again_args, again_kwargs = pack(tensors)
            # What needs weights and seeds alone, casts and masks, waits for its turn;
            # not under a strategy, whose graph went in a circle on two replicas.
            waits = not tf.distribute.has_strategy()
            parts = tf.nest.flatten(tensors if waits else [], expand_composites=True)
            with tf.control_dependencies(parts):
                return _run(
                    lambda: call(*again_args, **again_kwargs),
                    list(zip(variables, state, strict=True)),
                )

        run_there = _surrounded(run)

        @tf.custom_gradient
        def once(*tensors: Any) -> Any:
            with backend.AutocastScope(None):
                state = [tf.identity(variable.value) for variable in variables]
            with record.stop_recording():
                _refuse_what_differs(lambda: told.append(run(tensors, state)), name)
            results = told[-1]
            sums = _sums(results)

            def back(*upstream: Any, variables: Any = None) -> Any:
                given, seeds = _behind(tensors, state, upstream, in_xla())
                weights, floats = list(variables or ()), _floats(given)
                with tf.GradientTape() as tape:
                    tape.watch(floats)
                    again = run_there(given, seeds)
                pairs = zip(_sums(again), sums, strict=True)
                if any(abs(a - b) > _SAME * size for (a, _), (b, size) in pairs):
                    _refuse(name, "its outputs add up otherwise the second time")
                targets = zip([*again.tensors, *again.losses], upstream, strict=False)
                known = [(x, g) for x, g in targets if _floats([x]) and g is not None]
                found = tape.gradient(
                    [target for target, _ in known],
                    [*floats, *weights],
                    output_gradients=[gradient for _, gradient in known],
                )
                of_floats = iter(found[: len(floats)])
                by_tensors = [next(of_floats) if _floats([x]) else None for x in given]
                return (by_tensors, found[len(floats) :]) if weights else by_tensors

            flat = [*results.tensors, *results.losses]
            return [*flat, *(value for _, value in results.updates)], back

        flat = list(once(*inputs))
        results = told[-1]
        num_outputs, num_losses = len(results.tensors), len(results.losses)
        outputs = results.pack(flat[:num_outputs])
        for loss in flat[num_outputs : num_outputs + num_losses]:
            keras.layers.Layer.add_loss(owner, loss)  # which graphs refuse to users
        updates = flat[num_outputs + num_losses :]
        for (variable, _), value in zip(results.updates, updates, strict=True):
            variable.assign(tf.stop_gradient(value))
        return outputs

    return calling


def _surrounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is called in the scopes that are around it now."""
    # Layers write into the context on their way.
    context = copy.copy(global_state.get_global_attribute(_CONTEXT))
    autocast, stack = backend.get_autocast_scope(), list(CALLS.stack)

    def call(*args: Any) -> Any:
        scopes = {_CONTEXT: copy.copy(context), _AUTOCAST: autocast}
        with backend.global_attributes(**scopes), replaced(CALLS, stack=list(stack)):
            return function(*args)

    return call


def _run(call: Callable[[], Any], state: list[tuple[Any, Any]]) -> _Results:
    with backend.AutocastScope(None):  # else their dtypes are those of the scope
        scope = backend.StatelessScope(state_mapping=state, collect_losses=True)
    given = [scope.get_current_value(variable) for variable, _ in state]
    with scope:
        outputs = call()
    updates = [
        (variable, value)
        for (variable, _), before in zip(state, given, strict=True)
        if (value := scope.get_current_value(variable)) is not before
    ]
    return _Results(*_flat(outputs), updates, list(scope.losses))


def _behind(
    tensors: Sequence[Any], state: Sequence[Any], upstream: Sequence[Any], is_xla: bool
) -> tuple[list[Any], list[Any]]:
    """Returns tensors and state as they are once gradients have come, and not before.

    XLA takes no notice of control dependencies, and on CPUs its barriers are gone too
    early: there a 0 is added that it cannot know without the gradients.
    """
    given = [x for x in upstream if x is not None]
    # A tensor that comes as several arguments becomes several, each with a gradient.
    after: Callable[[Any], Any] = tf.identity
    if is_xla:
        number = tf.reduce_sum(tf.reshape(_floats(given)[0], [-1])[:1])
        is_finite = tf.math.is_finite(number)
        zero = tf.where(is_finite, number * 0, tf.zeros_like(number))

        def after(tensor: Any) -> Any:
            if tensor.dtype == tf.bool:
                return tf.logical_or(tensor, tf.cast(zero, tf.bool))
            if tensor.dtype.is_floating or tensor.dtype.is_integer:
                return tensor + tf.cast(zero, tensor.dtype)
            return tensor

    with tf.control_dependencies(given):
        return [after(x) for x in tensors], [after(x) for x in state]


def _floats(tensors: Sequence[Any]) -> list[Any]:
    return [x for x in tensors if x.dtype.is_floating]


def _flat(nested: Any) -> tuple[list[Any], Pack]:
    """Returns the tensors of a nested structure, and what packs others in its form."""
    leaves = tree.flatten(nested)
    is_tensor = [tf.is_tensor(x) and not isinstance(x, keras.Variable) for x in leaves]
    tensors = [x for x, yes in zip(leaves, is_tensor, strict=True) if yes]
    rest = [None if yes else x for x, yes in zip(leaves, is_tensor, strict=True)]
    hanging = [
        (place, name, other)
        for place, tensor in enumerate(tensors)
        for name in _HANGING
        if (other := getattr(tensor, name, None)) is not None
    ]
    places = [(place, name) for place, name, _ in hanging]
    shape = tree.map_structure(lambda _: 0, nested)  # which holds no tensor

    def pack(given: Sequence[Any]) -> Any:
        others = given[len(given) - len(places) :]
        for (place, name), other in zip(places, others, strict=True):
            setattr(given[place], name, other)
        left, pairs = iter(given), zip(rest, is_tensor, strict=True)
        packed = [next(left) if yes else x for x, yes in pairs]
        return tree.pack_sequence_as(shape, packed)

    return [*tensors, *(other for _, _, other in hanging)], pack


def _refuse_what_differs(run: Callable[[], Any], name: str) -> None:
    """Runs a call once; raises where a second time would not be the same."""
    if tf.executing_eagerly():
        run()
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    run()
    for operation in graph.get_operations()[before:]:
        kind = operation.type
        writes = kind.startswith(_WRITES) and kind.endswith("Op")
        if writes or kind.startswith(_DRAWS):
            what = "writes to a variable" if writes else "draws random numbers"
            _refuse(name, f"its {operation.name!r} ({kind}) {what} past Keras")


def _sums(results: _Results) -> list[tuple[float, float]]:
    """Returns the sums of outputs, and of their magnitudes, where known at once."""
    if not tf.executing_eagerly():
        return []
    floats = [tf.cast(x, tf.float32) for x in _floats(results.tensors)]
    return [(float(tf.reduce_sum(x)), float(tf.reduce_sum(abs(x)))) for x in floats]


def _refuse(name: str, why: str) -> NoReturn:
    raise ValueError(
        f"Cannot compute {name!r} again in the gradient: {why}; expected the same "
        "numbers and no further effect. Draw by a `keras.random.SeedGenerator`, write "
        "to `keras.Variable`s, or leave that layer out of `tfamp.remat`."
    )


def nodes_of(graph: Functional) -> list[Any]:
    """Returns the nodes of a graph in the order they run, inputs left out."""
    depths = sorted(graph._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in graph._nodes_by_depth[depth]]
    return [node for node in nodes if node.operation and not node.is_input]


def run_nodes(
    nodes: Iterable[Any], tensors: dict[int, Any], operation_fn: OperationFn
) -> None:
    """Calls nodes one after the other, but those whose inputs are missing.

    `tensors` has the values of the graph's tensors by their `id`; outputs are added.
    """
    for node in nodes:
        if any(id(x) not in tensors for x in node.input_tensors):
            continue
        args, kwargs = node.arguments.fill_in(tensors)
        outputs = operation_fn(node.operation)(*args, **kwargs)
        for x, y in zip(node.outputs, tree.flatten(outputs), strict=False):
            tensors[id(x)] = y


def replace_run(
    graph: Functional, run: Callable[[dict[int, Any], OperationFn], None] | None
) -> None:
    """Makes a graph run another way, or its own way again where `run` is None.

    `run` gets the inputs by the `id` of the graph's tensors and adds the outputs.
    """
    vars(graph).pop("_run_through_graph", None)
    if run is None:
        return
    original = graph._run_through_graph

    def _run_through_graph(
        inputs: Any, operation_fn: OperationFn = lambda op: op, call_fn: Any = None
    ) -> Any:
        if call_fn is not None:
            return original(inputs, operation_fn, call_fn)
        given = zip(graph.inputs, tree.flatten(inputs), strict=False)
        tensors = {id(x): y for x, y in given}
        run(tensors, operation_fn)
        if any(id(x) not in tensors for x in graph.outputs):
            return original(inputs, operation_fn)  # which says what is not connected
        return tree.pack_sequence_as(
            graph._outputs_struct, [tensors[id(x)] for x in graph.outputs]
        )

    # Past `__setattr__`, by which Keras tracks what is assigned.
    vars(graph)["_run_through_graph"] = _run_through_graph
