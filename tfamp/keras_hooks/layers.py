"""A layer's dtype policy that knows its layer, and the hook where layers are made.

A managed layer has a `Policy` of its own. Keras hands it on, asks it for the dtypes of
the layer, casts inputs through it, and writes it into configurations and files, where
it is a stock policy of the dtypes that were decided.

Relies on: `Layer.__init__` storing the policy of its `dtype` argument, with None
meaning the global policy object; `Layer._dtype_policy` being asked for each dtype;
`serialize_keras_object` writing a class under the name that it is exported by; pickling
naming a layer's `_unpickle_model`;
`global_state` keeping the global policy by name, per thread, and `clear_session`
dropping it.
"""

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export
from keras.src.backend.common import global_state

from tfamp.keras_hooks import backend, structure
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
# Settings under which layers compute in float16, as long as one of those lives.
FLOAT16: "weakref.WeakSet[Any]" = weakref.WeakSet()
# What was decided of a layer, as plans and files hold it.
FIELDS = ("rule", "reason", "output_dtype", "exact_inputs", "applies_to", "inner_dtype")


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

    Pickles of layers name `unpickle`, a function of a module, so that any process finds
    it. The dtypes are those of the policy it was made with, or float32 where a rule
    keeps the layer; rules that need the finished layer are asked as one is read.
    """

    unpickle: Callable[[Any], Any]

    def __init__(self, name: str, settings: Any = None, **decided: Any) -> None:
        super().__init__(name)
        self._layer: Any = lambda: None
        self.settings = settings  # under which the layer was made or applied
        self.kind = Kind.FOLLOWS
        self.rule = f"policy {name}"  # what decided, for people
        self.reason = ""  # why that rule exists, one sentence
        # What floating-point outputs are cast to, None to leave them.
        self.output_dtype: str | None = None
        self.exact_inputs = False  # whether inputs that were rounded come unrounded
        # "all" where sublayers follow this layer into float32, "self" where they keep
        # their own dtypes, "own" where what they return is widened, too.
        self.applies_to = "all"
        # What sublayers' outputs are cast to inside this layer: float32 for "own", half
        # precision where one that is called inside is a head, too.
        self.inner_dtype: str | None = None
        self._is_asking = False
        self.is_decided = False  # whether rules for finished layers have been asked
        self.is_propagated = False  # whether the sublayers follow it already
        self.is_resolved = False  # for a model: whether its heads have been found
        self.graph_key: int | None = None  # in which graph; it changes with each `add`
        self.made_in = "float32"  # the policy under which the layer was made
        # Where the call was tried: False for inference, True for training.
        self.tried: frozenset[bool] = frozenset()
        self.fails_in_float32 = False
        self.__dict__.update(decided)

    @property
    def is_kept(self) -> bool:
        """Whether a rule keeps the layer in float32."""
        return self.kind in KEPT

    @property
    def name(self) -> str:
        """The name of a stock policy with the same dtypes."""
        return "float32" if self._ask() else self._name

    @property
    def compute_dtype(self) -> str:
        """What the layer computes in."""
        return "float32" if self._ask() else self._compute_dtype

    @property
    def variable_dtype(self) -> str:
        """What the layer makes its weights in."""
        return "float32" if self._ask() else self._variable_dtype

    @property
    def given_name(self) -> str:
        """The name of the policy that the layer was made with."""
        return self._name

    @property
    def present_name(self) -> str:
        """The name as far as it is decided: no rule is asked."""
        return "float32" if self._is_float32 else self._name

    @property
    def _is_float32(self) -> bool:
        return self.is_kept and self._compute_dtype in HALF

    def _ask(self) -> bool:
        layer = self._layer()
        is_open = not (self.is_decided or self._is_asking)
        if is_open and self.kind is Kind.FOLLOWS and layer is not None:
            self._is_asking = True  # rules may read dtypes, too
            try:
                self.settings.ask(layer)
            except RuntimeError:  # the layer may be unfinished; raised at its call
                pass
            finally:
                self._is_asking = False
        return self._is_float32

    def bind(self, layer: Any) -> None:
        """Makes this the policy of a layer.

        Keras's own stay that quantize or map, and those of classes of the user's.
        """
        self._layer = weakref.ref(layer)
        if self._compute_dtype == "float16":
            FLOAT16.add(self.settings)
        given = vars(layer)["_dtype_policy"]
        _attach(layer, self)
        is_other = given.quantization_mode or isinstance(given, _MAP)
        if type(given) in (*_PLAIN, Policy) or not (
            is_other or self.kind is Kind.EXPLICIT
        ):
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


class GlobalPolicy(_LikeStock):
    """Keras's global policy in one thread: the one in force, whenever it is asked.

    `before` counts where nothing is in force; `token` tells the time since tfamp was
    enabled from others, and one change in it from another.
    """

    def __init__(
        self, before: Any, in_force: Callable[[], str | None], token: Any
    ) -> None:
        super().__init__("float32")
        self.before, self._in_force, self.token = before, in_force, token

    @property
    def present(self) -> keras.DTypePolicy:
        """A stock policy like it."""
        name = self._in_force()
        if name is not None:
            return keras.DTypePolicy(name)
        return self.before or keras.DTypePolicy(keras.config.floatx())

    name = property(lambda self: self.present.name)
    compute_dtype = property(lambda self: self.present.compute_dtype)
    variable_dtype = property(lambda self: self.present.variable_dtype)


# Files and configurations hold a stock policy in their place.
for _class in (Policy, GlobalPolicy):
    api_export.REGISTERED_OBJS_TO_NAMES[_class] = "keras.DTypePolicy"


def policy_of(layer: Any) -> Policy | None:
    """Returns the policy of a managed `layer`, None for an unmanaged one."""
    return vars(layer).get(_ATTRIBUTE)


def _attach(layer: Any, policy: Policy | None) -> None:
    own: dict[str, Any] = {_ATTRIBUTE: policy, "_unpickle_model": Policy.unpickle}
    for name, value in own.items():
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


def put(layer: Any, policy: keras.DTypePolicy | None) -> None:
    """Gives a layer another policy; for None it is unmanaged, with the same dtypes."""
    if isinstance(policy, Policy):
        policy.bind(layer)
    else:
        own, known = vars(layer), policy_of(layer)
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
    known = {} if policy is None else dict(policy.__dict__)
    return vars(layer)["_dtype_policy"], policy, known


def put_back(layer: Any, before: tuple[Any, Policy | None, dict[str, Any]]) -> None:
    """Puts a layer back to what `snapshot` found."""
    vars(layer)["_dtype_policy"], policy, known = before
    if policy is not None:
        policy.__dict__.update(known)
    _attach(layer, policy)
    follow(layer)


class _Calls(threading.local):
    """The managed layers whose `call` runs now, in this thread."""

    def __init__(self) -> None:
        self.stack: list[Policy] = []
        self.depth = 0  # of calls, from before a layer is built
        self.recorder: Any = None  # of the calls of a trace that is thrown away
        self.float16_layers: list[Any] = []  # references to those called last
        self.is_training = False  # whether a managed model's `train_step` runs
        self.may_keep = True  # whether a layer that fails may be tried in float32
        self.trial: Any = None  # of the layer that is being tried, for its sublayers
        self.asking: Any = None  # the same, for layers inside of these as well
        self.differentiated: Any = None  # a kept layer whose gradient is tried
        self.failed: Any = None  # a layer that was tried in vain, error, of gradient

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

    `after` is called with the layer and its `dtype` argument, when the constructor of
    the subclass goes on, `after_recurrent` with a recurrent layer whose cell exists.
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


def tell_thread(in_force: Callable[[], str | None], token: tuple[Any, Any]) -> None:
    """Has this thread's global policy be the one in force; for none what it had.

    `clear_session` forgets it. Where another thread has disabled tfamp since, what is
    there now counts.
    """
    known = global_state.get_global_attribute(_MARK)
    before = global_state.get_global_attribute(_GLOBAL)
    if known is not None and known.token[0] is token[0]:
        before = known.before
    elif isinstance(before, GlobalPolicy):
        before = before.before
    policy = None if in_force() is None else GlobalPolicy(before, in_force, token)
    if policy is not None or known is not None:
        global_state.set_global_attribute(_GLOBAL, policy or before)
    global_state.set_global_attribute(_MARK, policy)


def token_of_thread() -> Any:
    """Returns the token that this thread was told last, None where it has not been."""
    return getattr(global_state.get_global_attribute(_MARK), "token", None)


def global_policy_restored() -> contextlib.AbstractContextManager[None]:
    """Puts this thread's global policy back after the block."""
    names = (_GLOBAL, _MARK)
    present = {name: global_state.get_global_attribute(name) for name in names}
    return backend.global_attributes(**present)
