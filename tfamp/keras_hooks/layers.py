"""What tfamp knows of a layer, hooks where it is made, and Keras's global policy.

Relies on: `Layer.__init__` storing the policy of its `dtype` argument, with None
meaning the global policy object; `RNN.__init__` running after its cell exists;
`Bidirectional.__init__` making its two layers from a config, which turns the dtype that
the given layer inherited into an explicit one; `Layer.compute_dtype` and
`Layer.dtype_policy` being properties of `Layer`, through which all readers but `Layer`
itself go; `global_state` keeping the policy and anything else by name, per thread, and
`clear_session` dropping all of it at once.
"""

import contextlib
import dataclasses
import enum
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common import global_state

from tfamp.keras_hooks.patches import Function, Patch, followed_by, wrapper

_ATTRIBUTE = "_tfamp_record"
# Of one step: a loss may be computed by several models, or by layers one by one.
_NUM_LAYERS = 16


class Kind(enum.Enum):
    """How a layer came by its dtypes."""

    FOLLOWS = "policy"  # computes as the policy says
    EXPLICIT = "explicit"  # the user passed `dtype`, which wins
    FLOAT32_INSIDE = "float32 inside"  # the surrounding compute dtype out
    SUBLAYER = "sublayer"  # float32 because a layer around it is kept
    HEAD = "head"  # makes a model's output: float32 inside and out
    WIDE_OUTPUT = "wide output"  # the product in half precision, the rest float32
    OUTPUT_CAST = "output cast"  # a model whose output alone is cast to float32


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """How the dtypes of one managed layer are assigned.

    Attributes:
        settings: Those under which the layer was made or applied. Every managed layer
            holds it, so the hooks live as long as it does.
        kind: How the layer came by its dtypes.
        rule: Name of the rule that decided, for people.
        reason: Why that rule exists, one sentence.
        output_dtype: What floating-point outputs are cast to, None to leave them.
        exact_inputs: Whether inputs that were rounded come unrounded.
        applies_to: "all" where sublayers follow this layer into float32, "self" where
            they keep their own dtypes, "own" where what they return is widened, too.
        inner_dtype: What sublayers' outputs are cast to inside this layer: float32
            for "own", half precision where one that is called inside is a head, too.
        is_decided: Whether rules that need the finished layer have been asked.
        is_propagated: Whether the sublayers follow it already.
        is_resolved: For a model: whether its heads have been found.
        graph_key: For a model: which graph of layers they were found in. A Sequential
            model gets another with each `add`.
        made_in: The policy under which the layer was made, None where nobody knows.
        wrapped_optimizer: For a model: whether `compile` gave its optimizer the loss
            scale, so that it may be taken off again.
        tried: Where the call and its gradient were tried: False for inference, True for
            training.
    """

    settings: Any
    kind: Kind = Kind.FOLLOWS
    rule: str = "policy"
    reason: str = ""
    output_dtype: str | None = None
    exact_inputs: bool = False
    applies_to: str = "all"
    inner_dtype: str | None = None
    is_decided: bool = False
    is_propagated: bool = False
    is_resolved: bool = False
    graph_key: int | None = None
    made_in: str | None = None
    wrapped_optimizer: bool = False
    tried: tuple[bool, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerRecord":
        """A copied layer shares the record, which never changes."""
        return self

    @property
    def is_kept(self) -> bool:
        """Whether a rule keeps the layer in float32."""
        return self.kind in (Kind.FLOAT32_INSIDE, Kind.HEAD, Kind.SUBLAYER)


def record_of(layer: Any) -> LayerRecord | None:
    """Returns what tfamp knows of `layer`, or None for an unmanaged one."""
    return vars(layer).get(_ATTRIBUTE)


def set_record(layer: Any, record: LayerRecord) -> None:
    """Stores `record` on `layer`, past Keras's attribute tracking."""
    vars(layer)[_ATTRIBUTE] = record


def update_record(layer: Any, **changes: Any) -> LayerRecord:
    """Replaces fields of the record of a managed `layer`; returns the new one."""
    record = dataclasses.replace(vars(layer)[_ATTRIBUTE], **changes)
    set_record(layer, record)
    return record


def drop_record(layer: Any) -> None:
    """Makes `layer` an unmanaged one."""
    vars(layer).pop(_ATTRIBUTE, None)


class _Calls(threading.local):
    """The managed layers whose `call` runs now, in this thread."""

    def __init__(self) -> None:
        self.stack: list[LayerRecord] = []
        self.recorder: Any = None
        self.num_builds = 0  # how many layers are being built around this one
        self.float16_layers: list[Any] = []  # references to those called last
        self.is_training = False  # whether a managed model's `train_step` runs
        self.may_keep = True  # whether a layer that fails may be tried in float32
        self.is_managed = False  # whether the layer called last is, as it casts inputs
        self.trial: Any = None  # of the innermost layer that is being tried
        self.differentiated: Any = None  # a kept layer whose gradient is tried
        self.failed: Any = None  # a layer whose gradient failed, and the error
        self.messages: Any = None  # of TensorFlow, held back in a trial

    def note_float16(self, layer: Any) -> None:
        """Notes that an outermost layer under a float16 policy is called."""
        reference = weakref.ref(layer)  # one object as long as the layer lives
        known = self.float16_layers
        if known and known[-1] is reference:
            return
        if reference in known:
            known.remove(reference)
        known.append(reference)
        del known[:-_NUM_LAYERS]


CALLS = _Calls()


_MARK = "tfamp_lease"
_POLICY = "dtype_policy"


def patches(
    around: Callable[[], contextlib.AbstractContextManager[None]],
    after: Callable[[keras.layers.Layer, Any], None],
    after_recurrent: Callable[[keras.layers.Layer], None],
    after_bidirectional: Callable[[keras.layers.Layer, keras.layers.Layer], None],
) -> list[Patch]:
    """Returns the patches that report each new layer.

    Args:
        around: Gives a context for a layer's own initialisation, in which the
            global policy is what it should be.
        after: Called with the layer and the `dtype` argument it was given. Only what
            `Layer.__init__` sets can be read: the subclass's constructor goes on.
        after_recurrent: Called with a recurrent layer whose cell exists.
        after_bidirectional: Called with a `Bidirectional` layer and the layer given.
    """

    @wrapper
    def wrap_layer(
        original: Function, self: keras.layers.Layer, *args: Any, **kwargs: Any
    ) -> None:
        with around():
            original(self, *args, **kwargs)
            after(self, kwargs.get("dtype"))

    @wrapper
    def wrap_bidirectional(
        original: Function,
        self: keras.layers.Layer,
        layer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(self, layer, *args, **kwargs)
        after_bidirectional(self, layer)

    return [
        Patch(keras.layers.Layer, "__init__", wrap_layer),
        Patch(keras.layers.RNN, "__init__", followed_by(after_recurrent)),
        Patch(keras.layers.Bidirectional, "__init__", wrap_bidirectional),
    ]


def read_patches(before_read: Callable[[keras.layers.Layer], None]) -> list[Patch]:
    """Returns the patches by which a layer's dtype is decided before it is read.

    `before_read` is called with a managed layer that has not been called yet, and
    whose constructor may not have ended.
    """

    def wrap(original: property) -> property:
        read: Callable[[Any], Any] = original.fget  # type: ignore[assignment]

        def decided(self: keras.layers.Layer) -> Any:
            record = record_of(self)
            if record is not None and not record.is_decided:
                before_read(self)
            return read(self)

        return property(decided, original.fset, doc=original.__doc__)

    names = ("compute_dtype", "dtype_policy")
    return [Patch(keras.layers.Layer, name, wrap) for name in names]


class ThreadState:
    """The global state of one thread, which others may put back.

    `clear_session` gives every thread another one.
    """

    def __init__(self) -> None:
        self._values = vars(global_state.GLOBAL_STATE_TRACKER)

    @property
    def settings(self) -> Any:
        """The settings whose mark it carries, None without one."""
        return self._values.get(_MARK)

    @property
    def policy(self) -> keras.DTypePolicy | None:
        """The global policy object, None where none was set."""
        return self._values.get(_POLICY)

    def mark(self, settings: Any, policy: keras.DTypePolicy | None) -> None:
        """Sets the global policy and the mark; None for `settings` unmarks."""
        self._values[_MARK] = settings
        self._values[_POLICY] = policy


def is_marked(settings: Any) -> bool:
    """Returns whether this thread's state still carries the mark of `settings`."""
    return ThreadState().settings is settings


def mark(settings: Any, policy: keras.DTypePolicy | None) -> None:
    """Sets this thread's global policy and the mark; None for `settings` unmarks."""
    ThreadState().mark(settings, policy)


def present_policy() -> keras.DTypePolicy | None:
    """Returns this thread's global policy object, None where none was set."""
    return ThreadState().policy
