"""What tfamp knows of one layer, and which managed layer is being called."""

import dataclasses
import enum
import threading
import weakref
from typing import Any

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
        self.scales_by_hand = False  # whether Keras's own wrapper scaled the loss
        self.is_training = False  # whether a managed model's `train_step` runs
        self.may_keep = True  # whether a layer that fails may be tried in float32
        self.is_managed = False  # whether the layer called last is, as it casts inputs

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
