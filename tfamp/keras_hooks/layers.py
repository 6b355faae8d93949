"""A layer's dtype policy that knows its layer, and the hook where layers are made.

Keras hands a managed layer's `Policy` on, asks it for the dtypes of the layer, casts
inputs through it, and writes it down as a stock policy of the dtypes that were decided.

Relies on: `Layer.__init__` storing the policy of its `dtype` argument, with None
meaning the global policy object; `Layer._dtype_policy` being asked for each dtype;
pickling naming a layer's `_unpickle_model`.
"""

import enum
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import backend, structure
from tfamp.keras_hooks.in_force import IN_FORCE, LikeStock
from tfamp.keras_hooks.patches import Function, Patch, wrapper
from tfamp.keras_hooks.structure import Layer
from tfamp.records.formats import HALF

SOURCE = "_tfamp_source"  # what a tensor was rounded from
_ATTRIBUTE, _UNPICKLE = "_tfamp_policy", "_unpickle_model"
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
IN_HALF = (Kind.FOLLOWS, Kind.OUTPUT_CAST)  # where nothing keeps a layer in float32
# Settings under which layers compute in float16, as long as one of those lives.
FLOAT16: "weakref.WeakSet[Any]" = weakref.WeakSet()
# What was decided of a layer, as plans and files hold it.
FIELDS = ("rule", "reason", "output_dtype", "exact_inputs", "applies_to", "inner_dtype")


class Policy(LikeStock):
    """What one layer computes in, and why.

    The dtypes are those of the policy it was made with, or float32 where a rule keeps
    the layer; rules that need the finished layer are asked as one is read. Pickles of
    layers name `unpickle`, a function of a module, so that any process finds it.
    """

    unpickle: Callable[[Any], Any]

    kind = Kind.FOLLOWS
    reason = ""  # why the rule exists that decided, one sentence
    output_dtype: str | None = None  # of floating-point outputs, None to leave them
    exact_inputs = False  # whether inputs that were rounded come unrounded
    # "all" where sublayers follow this layer into float32, "own" where they keep their
    # dtypes and what they return is cast to `inner_dtype`.
    applies_to = "all"
    inner_dtype: str | None = None
    is_decided = False  # whether rules for finished layers have been asked
    is_propagated = False  # whether the sublayers follow it already
    is_resolved = False  # for a model: whether its heads have been found
    graph_key: Any = None  # in which graph; it changes with each `add`
    made_in = "float32"  # the policy under which the layer was made
    tried: frozenset[Any] = frozenset()  # the ways in which it has been called
    fails_in_float32 = False  # whether it was tried there in vain
    made_in_call = False  # of another layer: by each call anew, or by the first one
    _is_asking = False

    def __init__(self, name: str, settings: Any = None, **decided: Any) -> None:
        super().__init__(name)
        self._layer: Any = lambda: None
        self.given_name = name
        self.settings = settings  # under which the layer was made or applied
        self.rule = f"policy {name}"  # what decided, for people
        self.__dict__.update(decided)

    @property
    def is_kept(self) -> bool:
        """Whether a rule keeps the layer in float32."""
        return self.kind in KEPT

    @property
    def present_name(self) -> str:
        """The name as far as it is decided: no rule is asked."""
        is_float32 = self.is_kept and self._compute_dtype in HALF
        return "float32" if is_float32 else self._name

    @property
    def name(self) -> str:
        """The name of a stock policy with the same dtypes."""
        layer = self._layer()
        is_open = not (self.is_decided or self._is_asking or layer is None)
        if is_open and self.kind is Kind.FOLLOWS:
            self._is_asking = True  # rules may read dtypes, too
            try:
                self.settings.ask(layer)
            except RuntimeError:  # the layer may be unfinished; raised at its call
                pass
            finally:
                self._is_asking = False
        return self.present_name

    @property
    def compute_dtype(self) -> str:
        """What the layer computes in."""
        return self._compute_dtype if self.name == self._name else "float32"

    @property
    def variable_dtype(self) -> str:
        """What the layer makes its weights in."""
        return self._variable_dtype if self.name == self._name else "float32"

    def bind(self, layer: Any) -> None:
        """Makes this the policy of a layer.

        Keras's own stay that quantize or map, and those of classes of the user's.
        """
        self._layer = weakref.ref(layer)
        if self._compute_dtype == "float16":
            FLOAT16.add(self.settings)
        _attach(layer, self)
        given = vars(layer)["_dtype_policy"]
        is_map = isinstance(given, keras.dtype_policies.DTypePolicyMap)
        is_own = given.quantization_mode or is_map or self.kind is Kind.EXPLICIT
        if type(given) in (*_PLAIN, Policy) or not is_own:
            vars(layer)["_dtype_policy"] = self

    def convert_input(self, x: Any, autocast: bool, dtype: Any) -> Any:
        """Casts as Keras does; what was rounded remembers what it was rounded from."""
        y = super().convert_input(x, autocast, dtype)
        if y is x or not isinstance(y, tf.Tensor) or not y.dtype.is_floating:
            return y
        source = getattr(x, SOURCE, None)
        if source is None and y.dtype in backend.HALF and hasattr(x, "__array__"):
            # An array is converted and rounded in one go.
            is_half = isinstance(x, tf.Tensor) and x.dtype in backend.HALF
            source = None if is_half else x
        if source is not None:
            setattr(y, SOURCE, source)
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> keras.DTypePolicy:
        """Copies it for the copy of its layer; without one it is a stock policy."""
        layer = memo.get(id(self._layer()))
        if layer is None:
            return keras.DTypePolicy(self.name)
        made = memo[id(self)] = Policy.__new__(Policy)
        made.__dict__.update(vars(self), _layer=weakref.ref(layer))
        return made


def policy_of(layer: Any) -> Policy | None:
    """Returns the policy of a managed `layer`, None for an unmanaged one."""
    return vars(layer).get(_ATTRIBUTE)


def _attach(layer: Any, policy: Policy | None) -> None:
    for name, value in ((_ATTRIBUTE, policy), (_UNPICKLE, Policy.unpickle)):
        vars(layer).pop(name, None)
        if policy is not None:
            vars(layer)[name] = value


def update(layer: Any, **changes: Any) -> Policy:
    """Decides of a managed layer; weights stay as they are. Returns its policy."""
    policy: Policy = vars(layer)[_ATTRIBUTE]
    policy.__dict__.update(changes)
    if "kind" in changes:
        follow(layer)
    return policy


def keep(
    layer: Any, kind: Kind, rule: str, reason: str, applies_to: str = "all"
) -> None:
    """Decides that a managed layer, or what it gives, is float32, in one of the ways.

    One that is float32 inside gives the dtype that the layers around it compute in.
    """
    policy: Policy = vars(layer)[_ATTRIBUTE]
    half = policy.settings.compute_dtype
    gives = {Kind.FLOAT32_INSIDE: half, Kind.SUBLAYER: None, Kind.HEAD: None}
    update(
        layer,
        kind=kind,
        rule=rule,
        reason=reason,
        output_dtype=gives.get(kind, "float32"),
        applies_to=applies_to,
        inner_dtype="float32" if applies_to == "own" else None,
        is_decided=kind is not Kind.FLOAT32_INSIDE,  # else sublayers are to follow
        is_propagated=False,
        exact_inputs=policy.exact_inputs or kind in (Kind.FLOAT32_INSIDE, Kind.HEAD),
    )


def put(layer: Any, policy: keras.DTypePolicy | None) -> None:
    """Gives a layer another policy; for None it is unmanaged, with the same dtypes."""
    own, known = vars(layer), policy_of(layer)
    if isinstance(policy, Policy):
        policy.bind(layer)
    else:
        _attach(layer, None)
        if policy is not None:
            own["_dtype_policy"] = policy
        elif known is not None and own["_dtype_policy"] is known:
            own["_dtype_policy"] = keras.DTypePolicy(known.present_name)
    follow(layer)


def follow(layer: Any) -> None:
    """Has what depends on a layer's dtype follow it.

    A quantized layer stays so: its policy is that of the quantization, from its own.
    """
    policy, stock = policy_of(layer), layer.dtype_policy
    if policy is not None and stock.quantization_mode is not None:
        mode = stock.name.partition("_from_")[0]
        stock = keras.dtype_policies.get(f"{mode}_from_{policy.present_name}")
        vars(layer)["_dtype_policy"] = stock
    graph = structure.graph_of(layer)
    name = stock.present_name if isinstance(stock, Policy) else stock.name
    if graph is not None and name == "float32":
        structure.widen_inputs(graph)
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        structure.refresh_normalization(layer)


def snapshot(layer: Any) -> tuple[Any, Policy | None, dict[str, Any]]:
    """Returns the policies of a layer and all that its own knows, for `put_back`."""
    policy = policy_of(layer)
    return vars(layer)["_dtype_policy"], policy, dict(vars(policy) if policy else {})


def put_back(layer: Any, before: tuple[Any, Policy | None, dict[str, Any]]) -> None:
    """Puts a layer back to what `snapshot` found."""
    vars(layer)["_dtype_policy"], policy, known = before
    if policy is not None:
        policy.__dict__.clear()  # what is missing is as in the class
        policy.__dict__.update(known)
    _attach(layer, policy)
    follow(layer)


class _Calls(threading.local):
    """The managed layers whose `call` runs now, in this thread."""

    def __init__(self) -> None:
        self.stack: list[Policy] = []
        self.depth = 0  # of calls, from before a layer is built
        # What a trace of tfamp's own has seen of the outermost call, while one runs.
        self.looked: list[Any] | None = None
        self.has_given_half = False  # whether code outside of layers got it from one
        self.float16_layers: list[Any] = []  # references to those called last
        self.is_training = False  # whether a managed model's `train_step` runs
        self.is_evaluating = False  # or a `test_step` of its own
        self.may_keep = True  # whether a layer that fails may be tried in float32
        self.trial: Any = None  # of the layer in a trace that is called now
        self.differentiated: Any = None  # a kept layer whose gradient is tried
        self.failed: Any = None  # a layer that was tried in vain, error, of gradient

    def note_float16(self, layer: Any) -> None:
        """Notes that an outermost layer under a float16 policy is called."""
        reference = weakref.ref(layer)  # one object as long as the layer lives
        known = self.float16_layers
        if not known or known[-1] is not reference:
            known[:] = [*(each for each in known if each is not reference), reference]
            del known[:-_NUM_LAYERS]


CALLS = _Calls()


def patches(after: Callable[[Layer, Any], None]) -> list[Patch]:
    """Returns the patch that reports each new layer.

    `after` is called with the layer and its `dtype` argument, when the constructor of
    the subclass goes on.
    """

    @wrapper
    def wrap(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
        IN_FORCE.prepare_thread()
        original(self, *args, **kwargs)
        after(self, kwargs.get("dtype"))

    return [Patch(Layer, "__init__", wrap)]
