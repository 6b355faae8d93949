"""`PrecisionPlan`: what every layer of one model computes in, and who decided it."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import keras

from tfamp.dtypes import hooks, resolution, rows
from tfamp.dtypes.rows import KINDS, UNMANAGED, PlannedLayer, PlannedOperation
from tfamp.dtypes.settings import POLICIES, PolicySettings
from tfamp.keras_hooks import structure, trainer
from tfamp.keras_hooks.layers import Kind
from tfamp.records import checks
from tfamp.records.formats import HALF
from tfamp.records.record import TableRecord
from tfamp.records.versions import installed_versions

# Layers that no rule of tfamp's put into float32.
_LEFT = (Kind.FOLLOWS.value, Kind.EXPLICIT.value, UNMANAGED)


@dataclasses.dataclass(frozen=True)
class PrecisionPlan(TableRecord):
    """What a model computes in, layer by layer, as a file says it.

    A plan belongs to one architecture: layers are found by their place in the model,
    their class and their path, in which names that Keras numbers by itself count as
    equal. `enable(policy=plan)`, or the path of its file, makes a model under it;
    `apply` puts an existing one under it; a model saved under it loads so.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> plan = PrecisionPlan.from_model(model)
        >>> set(plan.layers.values()), PrecisionPlan.from_json(plan.to_json()) == plan
        ({'float32'}, True)
    """

    model: str  # the name of the model that it was made for
    policy: str  # of layers that nothing else decides
    rows: tuple[PlannedLayer, ...]  # the model and each (sub)layer, in order
    # Operations of Functional graphs that compute in float32.
    operations: tuple[PlannedOperation, ...] = ()
    has_default_rules: bool = True  # whether they stand for layers yet to come
    loss_scale: str | float | None = "dynamic"  # as `enable` takes it
    loss_scale_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Whether `compile` uses XLA where it is not told; None leaves it.
    jit_compile: bool | None = None
    # What was measured, on which devices and versions.
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.choice("policy", self.policy, POLICIES)
        for row in self.rows:
            checks.choice(f"kind of {row.path!r}", row.kind, (*KINDS, UNMANAGED))

    @property
    def layers(self) -> dict[str, str]:
        """The compute dtype of every layer by path, of the model itself as well."""
        return {row.path: row.compute_dtype for row in self.rows}

    @property
    def kept(self) -> dict[str, str]:
        """Layers and operations that are in float32 under a half policy, with why."""
        if keras.DTypePolicy(self.policy).compute_dtype not in HALF:
            return {}
        kept = [r for r in self.rows if r.kind not in _LEFT and r.rule]
        return {
            **{r.path: r.rule for r in kept if r.compute_dtype == "float32"},
            **{o.path: o.rule for o in self.operations},
        }

    @classmethod
    def from_model(
        cls, model: keras.layers.Layer, *, evidence: Mapping[str, Any] | None = None
    ) -> "PrecisionPlan":
        """Returns what a built model computes in now; a subclassed one was called.

        `evidence` is what was measured; None takes what came with the plan that the
        model is under, and the versions here. A TypeError or ValueError says that it is
        no model, or not built.
        """
        _check_built(model, "have a plan read from it")
        resolution.resolve(model)
        settings = resolution.settings_of(model)
        name = model.dtype_policy.name
        known: dict[str, Any] = {"policy": name if name in POLICIES else "float32"}
        if settings is not None:
            known = rows.facts_of(settings)
        present = known.pop("evidence", None) if evidence is None else evidence
        known["evidence"] = dict(present or {"versions": installed_versions()})
        return cls(
            model=model.name,
            rows=rows.read_layers(model),
            operations=rows.read_operations(model),
            **known,
        )

    def difference(self, model: keras.layers.Layer) -> str:
        """Returns the first way in which a model is not the plan's, "" if it is."""
        return rows.difference(model, self.rows, self.operations)

    def apply(self, model: keras.layers.Layer) -> keras.layers.Layer:
        """Puts a built, even a trained model under the plan, in place; returns it.

        Weights, optimizer and traces are treated as by `tfamp.apply`. A TypeError or
        ValueError says that it is no model, another one or not built, or has a layer
        that cannot compute as the plan says; it is as it was.
        """
        _check_built(model, "be put under a plan")
        settings = self.settings()
        hooks.install(settings)
        self.follow(model, settings, must=True)
        hooks.follow_policy(model, settings)
        if self.jit_compile is not None and trainer.is_compiled(model):
            trainer.set_jit_compile(model, self.jit_compile)
        return model

    def check(self, model: keras.layers.Layer) -> None:
        """Raises ValueError, naming the first difference, for another model."""
        different = self.difference(model)
        if different:
            raise ValueError(
                f"The plan was made for another model than {model.name!r}: "
                f"{different}. Use the plan of this model, or make one with "
                "`tfamp.tune`; where a program has several models, put the one under "
                "its plan with `plan.apply(model)`."
            )

    def settings(self) -> PolicySettings:
        """Returns the settings of layers that are made under the plan."""
        return rows.settings_from(vars(self), self.policy, plan=self)

    def follow(
        self, model: keras.layers.Layer, settings: PolicySettings, *, must: bool
    ) -> bool:
        """Gives a model the plan's dtypes, if it is the plan's; returns whether it is.

        `settings` are those that it was made under; where it `must` be, it is checked.
        """
        if must:
            self.check(model)
        if self.difference(model):
            return False
        rows.put_on(model, settings, self.rows, self.operations)
        return True

    @property
    def why(self) -> str:
        """What it is, in one line."""
        num_kept = len(self.kept)
        kept = f", {num_kept} layers and operations in float32" if num_kept else ""
        return f"a plan for model {self.model!r} of {len(self.rows)} layers{kept}"

    def replace(self, **changes: Any) -> "PrecisionPlan":
        """Returns the plan with other fields; the plan itself never changes."""
        return dataclasses.replace(self, **changes)

    def table(self) -> str:
        """Returns policy, evidence in a line, and a row for each layer."""
        cells = [
            (row.path, row.class_name, row.compute_dtype, row.rule, row.reason)
            for row in self.rows
        ]
        cells += [
            (o.path, f"{o.class_name} (operation)", "float32", o.rule, o.reason)
            for o in self.operations
        ]
        compiled = {None: "", True: ", XLA", False: ", without XLA"}[self.jit_compile]
        title = f"Plan for {self.model}: policy {self.policy}{compiled}"
        columns = ("layer", "class", "computes in", "decided by", "because")
        return rows.table(columns, cells, title)


def read_plan(given: Any) -> PrecisionPlan | None:
    """Returns a plan that is given itself or as its file, None for something else.

    A FileNotFoundError or ValueError says that the file is missing, or holds no plan.
    """
    if isinstance(given, PrecisionPlan):
        return given
    is_path = isinstance(given, os.PathLike)
    if is_path or (isinstance(given, str) and given.endswith(".json")):
        return PrecisionPlan.from_json(os.fspath(given))
    return None


def check_model(model: Any) -> None:
    """Raises TypeError for what is no model or layer of Keras 3."""
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"Cannot read the dtypes of {model!r}; expected a Keras 3 model or layer. "
            "Pass what `keras.Model(...)` gave."
        )


def _check_built(model: Any, purpose: str) -> None:
    check_model(model)
    unbuilt = [path for path, layer, _ in structure.walk(model) if not layer.built]
    if unbuilt:
        raise ValueError(
            f"Layer {unbuilt[0]!r} of {model.name!r} is not built; expected a built "
            f"model to {purpose}. Call it on a batch first."
        )
