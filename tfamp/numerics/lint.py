"""`tfamp.lint`: what half precision would spoil in a model, before a step is run."""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.dtypes.settings import IN_FORCE
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layers import policy_of
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.numerics.passes import build_by_call, check_is_model, name_layers
from tfamp.records import checks
from tfamp.records.findings import Finding, Findings, Severity
from tfamp.records.formats import FORMATS, HALF
from tfamp.stepping.arguments import dataset_of, first_batch
from tfamp.stepping.step_traces import Marks
from tfamp.stepping.unchanged import seeds_put_back

# What hands numbers on as they are, in another shape or in part, or in another dtype.
_PASSING = frozenset(
    "Identity Reshape Squeeze ExpandDims Transpose StridedSlice Slice Pack Unpack "
    "Split SplitV ConcatV2 StopGradient EnsureShape Cast".split()
)
# Answers from here on are rounded to 1 (a distance of half the spacing below 1), so
# that the gradient of a wrong one is 0: ln(2**12) in float16, ln(2**9) in bfloat16.
_SURE_AT = {"float16": 8.3, "bfloat16": 6.2}
_SATURATING = ("Softmax", "LogSoftmax", "Sigmoid")


class _Subject(NamedTuple):
    """All that the rules look at of a model, and why some of it is `missing`."""

    layers: dict[str, keras.layers.Layer]  # the model and every layer in it, by path
    outputs: Sequence[tf.Tensor]  # of a traced call for training
    marks: Marks  # which layers made what of it
    loss: Any
    optimizers: list[Any]
    missing: dict[str, str]


# What a rule yields: severity, layer or None, figure, message and remedy.
_Found = Iterator[tuple[Severity, str | None, float, str, str]]


def lint(
    model: keras.Model,
    data: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
    batch_size: int = 32,
) -> Findings:
    """Returns what half precision would spoil in a model.

    Rules read the layers, the outputs of one call for training, the loss and the
    optimizer. No step is run, and nothing changes but that a model without weights is
    built, if there are data. What tfamp keeps in float32 is no finding. `skipped` names
    the rules that could not run, and why. What numbers do in half precision is told by
    `tfamp.check`, with data.

    Args:
        model: A Keras model of any kind, compiled or not.
        data: What `fit` takes, or inputs alone. Without, the rule on outputs is
            skipped for a subclassed model.
        loss: What it is trained with; None takes that of `compile`.
        optimizer: An optimizer or its name, likewise.
        batch_size: Examples in a batch of arrays.

    Raises:
        TypeError: `model` is no Keras model, or `data` are nothing of the above.
        ValueError: The data are empty or single examples.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.Dense(8, dtype="mixed_bfloat16"),
        ...     keras.layers.Dense(8, "softmax", dtype="mixed_bfloat16", name="head")]
        >>> model = keras.Sequential(layers)
        >>> [(each.rule, each.layer) for each in lint(model).errors]
        [('half-head', 'head')]
    """
    check_is_model(model)
    dataset = None
    if data is not None:
        dataset = dataset_of(data, batch_size, needs_targets=False)
    subject = _look(model, loss, optimizer, dataset)
    findings, ran, skipped = [], [], []
    for name, rule in _RULES.items():
        if name in subject.missing:
            skipped.append(f"{name}: {subject.missing[name]}")
            continue
        ran.append(name)
        page = checks.address(f"lint#{name}")
        for severity, layer, figure, message, remedy in dict.fromkeys(rule(subject)):
            place: Any = {"layer": layer, "figure": float(figure)}
            place["details"] = {"documentation": page}
            findings.append(Finding(name, severity, message, remedy, **place))
    halves = {each.compute_dtype for each in subject.layers.values()} & {*HALF}
    computing = " and ".join(sorted(halves)) or "no half precision"
    title = f"Lint of model {model.name!r}, with {computing}"
    return Findings(tuple(findings), title, tuple(ran), tuple(skipped))


def _look(
    model: keras.Model, loss: Any, optimizer: Any, dataset: tf.data.Dataset | None
) -> _Subject:
    """Returns what the rules look at; a model that is not built is built, with data."""
    x, outputs, missing = None, [], {}
    if dataset is not None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(first_batch(dataset))
    elif structure.graph_of(model) is not None:
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in model.inputs]
        x = specs[0] if len(specs) == 1 else specs
    else:
        missing["half-head"] = (
            f"model {model.name!r} tells its inputs by its call only, and no `data` "
            "were passed"
        )
    marks = Marks(model)
    with seeds_put_back(), warnings.catch_warnings():
        # What a call warns of, it will warn of in training.
        warnings.simplefilter("ignore")
        if dataset is not None:
            build_by_call(model, x)
        if x is not None:
            try:
                outputs = _traced(model, x, marks)
            except Exception as error:  # the user's own code, which may do anything
                why = checks.kind_and_line(error)
                missing["half-head"] = f"the model cannot be traced ({why})"
    loss = getattr(model, "loss", None) if loss is None else loss
    if loss is None:
        missing["half-loss"] = "no `loss` was passed, and the model has none"
    given = None if optimizer is None else keras.optimizers.get(optimizer)
    optimizers = optimizers_of(model) if given is None else [given]
    layers = {path: layer for path, layer, _ in structure.walk(model)}
    return _Subject(layers, outputs, marks, loss, optimizers, missing)


def _traced(model: keras.Model, x: Any, marks: Marks) -> list[tf.Tensor]:
    """Returns the outputs of a call for training, on inputs or specs of them."""
    specs = [
        leaf if isinstance(leaf, tf.TensorSpec) else tf.type_spec_from_value(leaf)
        for leaf in tf.nest.flatten(x)
    ]
    parameters = inspect.signature(model.call).parameters
    options = {"training": True} if "training" in parameters else {}

    @tf.autograph.experimental.do_not_convert
    def forward(*leaves: Any) -> Any:
        inputs = tf.nest.pack_sequence_as(x, leaves)
        # Layers keep the losses that they add, but not those of this call.
        with keras.StatelessScope(collect_losses=True), tf.name_scope(marks.scope):
            return model(inputs, **options)

    with model.distribute_strategy.scope(), marks.placed():
        return list(tf.function(forward).get_concrete_function(*specs).outputs)


def _half_head(subject: _Subject) -> _Found:
    """Outputs that are made in half precision, above all by softmax and sigmoid."""
    for output in subject.outputs:
        maker = output.op
        while maker.type in _PASSING and maker.inputs[0].dtype.is_floating:
            maker = maker.inputs[0].op
        dtype, saturates = maker.outputs[0].dtype.name, maker.type in _SATURATING
        is_low = saturates or output.dtype.name in HALF
        if not output.dtype.is_floating or dtype not in HALF or not is_low:
            continue
        message = f"This layer makes an output in {dtype}: the loss is computed on "
        message += "what was rounded."
        if saturates:
            message = (
                f"The output is the {maker.type.lower()} of this layer in {dtype}: "
                f"from logits of about {_SURE_AT[dtype]:g} on it is rounded to 0 or 1, "
                "where the gradient of a wrong answer is 0 or NaN."
            )
        yield (
            "error" if saturates else "warning",
            subject.marks.layer_of(maker.name) or None,
            _SURE_AT[dtype] if saturates else FORMATS[dtype].epsilon,
            message,
            "Give the layer `dtype='float32'`, or build the model under "
            "`tfamp.enable`, which keeps heads in float32.",
        )


def _half_loss(subject: _Subject) -> _Found:
    """Losses that compute in half precision themselves."""
    losses = {"Keras's default (`keras.config.floatx()`)": keras.config.floatx()}
    for each in structure.flatten(subject.loss):
        if isinstance(each, keras.losses.Loss):
            losses[each.name] = each.dtype
    for name, dtype in losses.items():
        if dtype in HALF:
            yield (
                "error",
                None,
                FORMATS[dtype].max,
                f"The loss {name!r} is computed in {dtype}: logarithms and sums over "
                f"the batch have few digits and end at {FORMATS[dtype].max:g}.",
                "Leave out the loss's `dtype`, and keep `keras.config.floatx()` at "
                "'float32'.",
            )


def _late_policy(subject: _Subject) -> _Found:
    """Layers that were made before the policy, and so in float32."""
    records = {path: policy_of(layer) for path, layer in subject.layers.items()}
    settings = [IN_FORCE.settings, *(r.settings for r in records.values() if r)]
    wanted = [s.policy.name for s in settings if s is not None and s.is_half]
    computing = [p for p, each in subject.layers.items() if structure.own_weights(each)]
    late = [
        path
        for path in computing
        if records[path] is None and subject.layers[path].compute_dtype == "float32"
    ]
    if wanted and late:
        yield (
            "warning",
            late[0],
            len(late),
            f"{len(late)} of {len(computing)} layers with weights were made in float32 "
            f"before the policy {wanted[0]!r} was set, and stay there: "
            f"{name_layers(late)}.",
            "Set the policy before the first layer is made, or convert the model in "
            "place: `tfamp.apply(model)`.",
        )


def _half_weights(subject: _Subject) -> _Found:
    """Trainable weights in half precision, and what optimizers lose on them.

    Keras casts rates, betas and epsilons to the dtype of the weight, and keeps the
    moments in it.
    """
    for dtype in HALF:
        layers = [
            path
            for path, layer in subject.layers.items()
            if any(
                w.trainable and w.dtype == dtype for w in structure.own_weights(layer)
            )
        ]
        if not layers:
            continue
        lost, dead = FORMATS[dtype].epsilon / 4, []
        for optimizer in subject.optimizers:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            for name in "beta_1 beta_2 momentum rho epsilon epsilon_1".split():
                value = getattr(inner, name, None)
                if not isinstance(value, float) or value in (0, 1):
                    continue
                rounded = float(tf.cast(value, dtype))
                if rounded in (0, 1):
                    dead.append(f"`{name}={value:g}` of {inner.name!r} is {rounded:g}")
        text = (
            f"The weights of {name_layers(layers)} are stored in {dtype}, where an "
            f"update of less than {lost:.2g} of a weight is lost"
        )
        if dead:
            text += f", and {' and '.join(dead)}: averages never decay, or updates are "
            text += "0 / 0"
        yield (
            "error" if dead else "warning",
            layers[0],
            lost,
            f"{text}.",
            f"Use the policy 'mixed_{dtype}', which keeps weights in float32.",
        )


_RULES = {
    "half-head": _half_head,
    "half-loss": _half_loss,
    "late-policy": _late_policy,
    "half-weights": _half_weights,
}
RULE_IDS = tuple(_RULES)
