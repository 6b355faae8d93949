"""A layer's dtype policy that knows its layer, and hooks where layers are made.

A managed layer has a `Policy` of its own. Keras hands it on, asks it for the dtypes of
the layer, casts inputs through it, and writes it into configurations and files, where
it is a stock policy of the dtypes that were decided.

Relies on: `Layer.__init__` storing the policy of its `dtype` argument, with None
meaning the global policy object; `Layer._dtype_policy` being asked for each dtype;
`serialize_keras_object` writing a class under the name that it is exported by;
`global_state` keeping the global policy by name, per thread, and `clear_session`
dropping it.
"""

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export
from keras.src.backend.common import global_state

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.backend import HALF as HALF_TYPES
from tfamp.keras_hooks.patches import Function, Patch, followed_by, wrapper
from tfamp.records.formats import HALF

SOURCE = "_tfamp_source"  # what a tensor was rounded from
_ATTRIBUTE = "_tfamp_policy"
_GLOBAL, _MARK = "dtype_policy", "tfamp_policy_in_force"
_MAP = keras.dtype_policies.DTypePolicyMap
_PLAIN = (keras.DTypePolicy, keras.dtype_policies.FloatDTypePolicy)
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


KEPT = (Kind.FLOAT32_INSIDE, Kind.HEAD, Kind.SUBLAYER)
# Of the layers that live and may compute in float16.
FLOAT16: "weakref.WeakSet[Any]" = weakref.WeakSet()
# What was decided of a layer, as plans and files hold it.
FIELDS = (
    "rule",
    "reason",
    "output_dtype",
    "exact_inputs",
    "applies_to",
    "inner_dtype",
)


class _LikeStock(keras.DTypePolicy):
    """A policy that equals, shows and pickles as the stock one of its name."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, keras.DTypePolicy) and self.name == other.name

    def __repr__(self) -> str:
        return f'<DTypePolicy "{self.name}">'

    def __reduce__(self) -> tuple[Any, ...]:
        return keras.DTypePolicy, (self.name,)


class Policy(_LikeStock):
    """What one layer computes in, and why.

    Its dtypes are those of the policy it was made with, or float32 where a rule keeps
    the layer; rules that need the finished layer are asked as the dtype is read.

    Attributes:
        settings: Those under which the layer was made or applied.
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
        fails_in_float32: Whether its call has raised in float32, as in half precision.
    """

    def __init__(self, name: str, settings: Any = None, **decided: Any) -> None:
        super().__init__(name)
        self._layer: Any = lambda: None
        self.settings = settings
        self.kind = Kind.FOLLOWS
        self.rule = f"policy {name}"
        self.reason = ""
        self.output_dtype: str | None = None
        self.exact_inputs = False
        self.applies_to = "all"
        self.inner_dtype: str | None = None
        self.is_decided = False
        self.is_propagated = False
        self.is_resolved = False
        self.graph_key: int | None = None
        self.made_in: str | None = None
        self.wrapped_optimizer = False
        self.tried: tuple[bool, ...] = ()
        self.fails_in_float32 = False
        self.__dict__.update(decided)

    @property
    def is_kept(self) -> bool:
        """Whether a rule keeps the layer in float32."""
        return self.kind in KEPT

    @property
    def name(self) -> str:
        """The name of a stock policy with the same dtypes."""
        self._ask()
        return self.present_name

    @property
    def compute_dtype(self) -> str:
        """What the layer computes in."""
        self._ask()
        return "float32" if self._is_float32 else self._compute_dtype

    @property
    def variable_dtype(self) -> str:
        """What the layer makes its weights in."""
        self._ask()
        return "float32" if self._is_float32 else self._variable_dtype

    @property
    def present_name(self) -> str:
        """The name as far as it is decided: no rule is asked."""
        return "float32" if self._is_float32 else self._name

    @property
    def given_name(self) -> str:
        """The name of the policy that the layer was made with."""
        return self._name

    @property
    def _is_float32(self) -> bool:
        return self.kind in KEPT and self._compute_dtype in HALF

    def _ask(self) -> None:
        if not self.is_decided and self.kind is Kind.FOLLOWS:
            layer = self._layer()
            if layer is not None:
                self.settings.ask_on_read(layer)

    def bind(self, layer: Any) -> None:
        """Makes this the policy of a layer; Keras's own stay if they quantize or map.

        So does one of a class of the user's own that was passed to the layer.
        """
        self._layer = weakref.ref(layer)
        if self._compute_dtype == "float16":
            FLOAT16.add(self.settings)
        own = vars(layer)
        own[_ATTRIBUTE], given = self, own["_dtype_policy"]
        is_other = given.quantization_mode or isinstance(given, _MAP)
        if type(given) in (*_PLAIN, Policy) or not (
            is_other or self.kind is Kind.EXPLICIT
        ):
            own["_dtype_policy"] = self

    def convert_input(self, x: Any, autocast: bool, dtype: Any) -> Any:
        """Casts as Keras does; what was rounded remembers what it was rounded from.

        Only layers that ask for exact inputs look at it; in a graph the unused branch
        is pruned.
        """
        y = super().convert_input(x, autocast, dtype)
        if y is x or not isinstance(y, tf.Tensor) or not y.dtype.is_floating:
            return y
        if isinstance(x, tf.Tensor):
            source = getattr(x, SOURCE, None)
            if source is None and y.dtype in HALF_TYPES and x.dtype not in HALF_TYPES:
                source = x
        else:  # an array or a list, converted and rounded in one go
            source = x if hasattr(x, "__array__") and y.dtype in HALF_TYPES else None
        if source is not None:
            setattr(y, SOURCE, source)
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> keras.DTypePolicy:
        """Copies it for the copy of its layer; without one it is a stock policy."""
        layer = memo.get(id(self._layer()))
        if layer is None:
            return keras.DTypePolicy(self.name)
        made = Policy.__new__(Policy)
        made.__dict__.update(vars(self))
        made._layer = weakref.ref(layer)
        memo[id(self)] = made
        return made


class GlobalPolicy(_LikeStock):
    """Keras's global policy in this thread: the one in force, whenever it is asked.

    `before` is what the thread had; `in_force` gives the name, None where tfamp is not
    enabled.
    """

    def __init__(self, before: Any, in_force: Callable[[], str | None]) -> None:
        super().__init__("float32")
        self.before, self._in_force = before, in_force
        self._state = vars(global_state.GLOBAL_STATE_TRACKER)

    def put(self, *, is_enabled: bool) -> bool:
        """Makes it the policy of its thread again, or puts back what that had.

        Returns whether it is that of its thread now.
        """
        if self._state.get(_MARK) is not self:
            return False
        self._state[_GLOBAL] = self if is_enabled else self.before
        self._state[_MARK] = self if is_enabled else None
        return is_enabled

    @property
    def present(self) -> keras.DTypePolicy:
        """A stock policy like it."""
        name = self._in_force()
        if name is not None:
            return keras.DTypePolicy(name)
        return self.before or keras.DTypePolicy(keras.config.floatx())

    @property
    def name(self) -> str:
        """The name of the policy in force."""
        return self.present.name

    @property
    def compute_dtype(self) -> str:
        """What new layers compute in."""
        return self.present.compute_dtype

    @property
    def variable_dtype(self) -> str:
        """What new layers make their weights in."""
        return self.present.variable_dtype


# Files and configurations hold a stock policy in their place.
api_export.REGISTERED_OBJS_TO_NAMES[Policy] = "keras.DTypePolicy"
api_export.REGISTERED_OBJS_TO_NAMES[GlobalPolicy] = "keras.DTypePolicy"


def policy_of(layer: Any) -> Policy | None:
    """Returns the policy of a managed `layer`, None for an unmanaged one."""
    return vars(layer).get(_ATTRIBUTE)


def update(layer: Any, **changes: Any) -> Policy:
    """Decides of a managed layer; weights stay as they are. Returns its policy."""
    policy: Policy = vars(layer)[_ATTRIBUTE]
    policy.__dict__.update(changes)
    if "kind" in changes:
        follow(layer)
    return policy


def put(layer: Any, policy: keras.DTypePolicy | None) -> None:
    """Gives a layer another policy, one of its own or a stock one without rules.

    A quantized layer stays so: its policy is that of the quantization, from this one.
    """
    if isinstance(policy, Policy):
        policy.bind(layer)
    else:
        vars(layer).pop(_ATTRIBUTE, None)
        given = vars(layer)["_dtype_policy"]
        if policy is not None and given is not policy:
            layer.dtype_policy = _quantized_as(given, policy)
    follow(layer)


def _quantized_as(given: Any, policy: keras.DTypePolicy) -> keras.DTypePolicy:
    if given.quantization_mode is None or policy.quantization_mode is not None:
        return policy
    mode = given.name.partition("_from_")[0]
    return keras.dtype_policies.get(f"{mode}_from_{_present_name(policy)}")


def _present_name(policy: keras.DTypePolicy) -> str:
    """Returns the name of a policy as far as it is decided: no rule is asked."""
    return policy.present_name if isinstance(policy, Policy) else policy.name


def drop(layer: Any) -> None:
    """Makes a layer an unmanaged one, of the same dtypes."""
    policy = vars(layer).pop(_ATTRIBUTE, None)
    if policy is not None and vars(layer)["_dtype_policy"] is policy:
        vars(layer)["_dtype_policy"] = keras.DTypePolicy(policy.present_name)


def follow(layer: Any) -> None:
    """Has what depends on a layer's dtype follow it."""
    policy, stock = policy_of(layer), layer.dtype_policy
    if policy is not None and stock.quantization_mode is not None:
        stock = vars(layer)["_dtype_policy"] = _quantized_as(stock, policy)
    graph = structure.graph_of(layer)
    if graph is not None and _present_name(stock) == "float32":
        structure.widen_inputs(graph)
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        structure.refresh_normalization(layer)


def snapshot(layer: Any) -> tuple[Any, Policy | None, dict[str, Any]]:
    """Returns the policies of a layer and all that its own knows, for `put_back`."""
    policy = policy_of(layer)
    known = {} if policy is None else dict(policy.__dict__)
    return vars(layer)["_dtype_policy"], policy, known


def put_back(layer: Any, before: tuple[Any, Policy | None, dict[str, Any]]) -> None:
    """Puts a layer back to what `snapshot` found."""
    vars(layer).pop(_ATTRIBUTE, None)
    vars(layer)["_dtype_policy"], policy, known = before
    if policy is not None:
        policy.__dict__.update(known)
        vars(layer)[_ATTRIBUTE] = policy
    follow(layer)


class _Calls(threading.local):
    """The managed layers whose `call` runs now, in this thread."""

    def __init__(self) -> None:
        self.stack: list[Policy] = []
        self.recorder: Any = None
        self.num_builds = 0  # how many layers are being built around this one
        self.float16_layers: list[Any] = []  # references to those called last
        self.is_training = False  # whether a managed model's `train_step` runs
        self.may_keep = True  # whether a layer that fails may be tried in float32
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


def patches(
    before: Callable[[], None],
    after: Callable[[keras.layers.Layer, Any], None],
    after_recurrent: Callable[[keras.layers.Layer], None],
) -> list[Patch]:
    """Returns the patches that report each new layer.

    `before` is called ahead of a layer's own initialisation, `after` with the layer and
    the `dtype` argument it was given. Only what `Layer.__init__` sets can be read: the
    subclass's constructor goes on. `after_recurrent` is called with a recurrent layer
    whose cell exists.
    """

    @wrapper
    def wrap_layer(
        original: Function, self: keras.layers.Layer, *args: Any, **kwargs: Any
    ) -> None:
        before()
        original(self, *args, **kwargs)
        after(self, kwargs.get("dtype"))

    return [
        Patch(keras.layers.Layer, "__init__", wrap_layer),
        Patch(keras.layers.RNN, "__init__", followed_by(after_recurrent)),
    ]


def present_policy() -> keras.DTypePolicy | None:
    """Returns this thread's global policy object, None where none was set."""
    return global_state.get_global_attribute(_GLOBAL)


def set_policy_in_force(policy: GlobalPolicy | None) -> None:
    """Has this thread's global policy be the one in force; None leaves it to Keras.

    `clear_session` forgets it.
    """
    known = policy_in_force()
    after = policy if policy is not None else known and known.before
    if policy is not None or known is not None:
        global_state.set_global_attribute(_GLOBAL, after)
    global_state.set_global_attribute(_MARK, policy)


def policy_in_force() -> GlobalPolicy | None:
    """Returns what `set_policy_in_force` gave this thread, None where it is gone."""
    return global_state.get_global_attribute(_MARK)


@contextlib.contextmanager
def global_policy_restored() -> Iterator[None]:
    """Puts this thread's global policy back after the block."""
    policy, mark = present_policy(), policy_in_force()
    try:
        yield
    finally:
        global_state.set_global_attribute(_GLOBAL, policy)
        global_state.set_global_attribute(_MARK, mark)
