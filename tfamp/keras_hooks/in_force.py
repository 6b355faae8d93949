"""What new layers come under: in the process, in a block, and as Keras is told.

`enable` acts on the whole process. A `scope`, and the loading of a file, act on the
thread or task that runs their block. Keras's global policy, which each thread has of
its own, says what is in force; it is asked for it anew each time.

Relies on: `global_state` keeping the global policy by name, per thread, and
`clear_session` dropping it.
"""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import keras
from keras.src import api_export
from keras.src.backend.common import global_state

from tfamp.keras_hooks import backend
from tfamp.records import checks

NOT_ENABLED = "tfamp is not enabled"
_GLOBAL, _TOLD = "dtype_policy", "tfamp_policy_in_force"


class LikeStock(keras.DTypePolicy):
    """A policy that equals, shows, pickles and is written as the stock one."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        api_export.REGISTERED_OBJS_TO_NAMES[cls] = "keras.DTypePolicy"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, keras.DTypePolicy) and self.name == other.name

    def __repr__(self) -> str:
        return f'<DTypePolicy "{self.name}">'

    def __reduce__(self) -> tuple[Any, ...]:
        return keras.DTypePolicy, (self.name,)


@dataclasses.dataclass(eq=False)
class Setting:
    """What new layers come under; each change makes another one."""

    settings: Any = None  # of managed layers, None where layers are left to Keras
    why: str = NOT_ENABLED  # why the policy was chosen
    loaded: str | None = None  # the policy of the saved model that is being loaded
    enabled: Any = None  # tells the time since tfamp was enabled from others

    @property
    def name(self) -> str | None:
        """The name of the policy in force, None for no policy."""
        return None if self.settings is None else self.settings.policy.name

    def changed(self, **changes: Any) -> "Setting":
        """Returns the setting with other fields."""
        enabled = object() if self.settings is None else self.enabled
        return dataclasses.replace(self, enabled=enabled, **changes)


class GlobalPolicy(LikeStock):
    """Keras's global policy in one thread: the one in force, whenever it is asked.

    `before` counts where nothing is in force; `told` is what the thread heard last.
    """

    def __init__(self, before: Any, told: Setting) -> None:
        super().__init__("float32")
        self.before, self.told = before, told

    @property
    def present(self) -> keras.DTypePolicy:
        """A stock policy like it."""
        name = IN_FORCE.present.name
        if name is not None:
            return keras.DTypePolicy(name)
        return self.before or keras.DTypePolicy(keras.config.floatx())

    name = property(lambda self: self.present.name)
    compute_dtype = property(lambda self: self.present.compute_dtype)
    variable_dtype = property(lambda self: self.present.variable_dtype)


_BLOCK: contextvars.ContextVar[Setting | None] = contextvars.ContextVar(
    "tfamp_block", default=None
)


class InForce:
    """The setting of the process, and that of the innermost block that is open."""

    def __init__(self) -> None:
        self._everywhere = Setting()
        self._warned: set[str] = set()

    @property
    def present(self) -> Setting:
        """The setting that holds here."""
        return _BLOCK.get() or self._everywhere

    @property
    def settings(self) -> Any:
        """The settings that new layers come under here."""
        return self.present.settings

    def put(self, settings: Any, why: str = NOT_ENABLED) -> None:
        """Changes the setting that holds here; other threads hear of it in time."""
        made = self.present.changed(settings=settings, why=why)
        if _BLOCK.get() is None:
            self._everywhere = made
        else:
            _BLOCK.set(made)
        self._warned.clear()
        self._tell_thread()

    @contextlib.contextmanager
    def block(self, **changes: Any) -> Iterator[None]:
        """Gives the block a setting of its own: the present one with `changes`."""
        names = (_GLOBAL, _TOLD)
        before = {name: global_state.get_global_attribute(name) for name in names}
        token = _BLOCK.set(self.present.changed(**changes))
        try:
            with backend.global_attributes(**before):
                self._tell_thread()
                yield
        finally:
            _BLOCK.reset(token)

    def prepare_thread(self) -> None:
        """Has a thread hear of the policy in force that has not, or forgot it."""
        told = global_state.get_global_attribute(_TOLD)
        if self.settings is not None and (
            told is None or told.told is not self.present
        ):
            self._tell_thread()

    def _tell_thread(self) -> None:
        """Has this thread's global policy be the one in force; for none what it had."""
        known = global_state.get_global_attribute(_TOLD)
        before = global_state.get_global_attribute(_GLOBAL)
        if known is not None and known.told.enabled is self.present.enabled:
            before = known.before
        elif isinstance(before, GlobalPolicy):
            before = before.before
        is_on = self.settings is not None
        policy = GlobalPolicy(before, self.present) if is_on else None
        if policy is not None or known is not None:
            global_state.set_global_attribute(_GLOBAL, policy or before)
        global_state.set_global_attribute(_TOLD, policy)

    def holds(self, policy: str) -> bool:
        """States whether new layers come under the policy of this name."""
        present = self.present
        return present.settings is not None and policy in (present.name, present.loaded)

    def warn_of_foreign(self, policy: keras.DTypePolicy) -> None:
        """Warns once of a policy that other code set while tfamp was enabled."""
        name = policy.name
        if name in self._warned:
            return
        self._warned.add(name)
        warnings.warn(
            f"Keras's global policy was set to {name!r} by other code while tfamp was "
            "enabled, so new layers take it and tfamp's rules do not act on them. "
            f"Leave that line out, or name the policy in `tfamp.enable({name!r})`; for "
            "some layers alone use `tfamp.scope(...)`.",
            UserWarning,
            stacklevel=checks.level_of_user(),
        )


IN_FORCE = InForce()
