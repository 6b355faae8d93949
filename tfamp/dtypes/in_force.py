"""Which settings new layers come under: the process's, or those of a block.

`enable` acts on the whole process. A `scope`, and the loading of a file, act on the
thread or task that runs their block, so two threads never see each other's. Keras's own
global policy is kept to what is in force in each thread.
"""

import contextlib
import contextvars
import dataclasses
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import layers
from tfamp.records import checks

NOT_ENABLED = "tfamp is not enabled"


@dataclasses.dataclass
class Setting:
    """What new layers come under, and what comes back afterwards."""

    # The settings of managed layers, None where they are left to Keras.
    settings: PolicySettings | None = None
    why: str = NOT_ENABLED  # why the policy was chosen
    # The policy of the saved model that is being loaded, whose layers are made under
    # the settings instead, or else in float32.
    loaded: str | None = None
    # The threads whose Keras policy is that of the settings all the time, by number.
    threads: dict[int, "_Thread"] = dataclasses.field(default_factory=dict)


class _Thread(NamedTuple):
    """A thread that called `enable`, or whose block it is."""

    state: layers.ThreadState
    policy_before: keras.DTypePolicy | None  # Keras's policy, as the user had set it


_BLOCKS: contextvars.ContextVar[tuple[Setting, ...]] = contextvars.ContextVar(
    "tfamp_blocks", default=()
)


class InForce:
    """The setting of the process and those of the blocks that are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._everywhere = Setting()
        self._num_blocks = 0

    @property
    def present(self) -> Setting:
        """The setting that holds here: of the innermost block, or the process's."""
        blocks = _BLOCKS.get()
        return blocks[-1] if blocks else self._everywhere

    @property
    def settings(self) -> PolicySettings | None:
        """The settings that new layers come under here."""
        return self.present.settings

    @property
    def is_used(self) -> bool:
        """Whether any thread may make managed layers."""
        return self._everywhere.settings is not None or self._num_blocks > 0

    @property
    def owns_thread(self) -> bool:
        """Whether the present setting was made in this thread."""
        return threading.get_ident() in self.present.threads

    def put(self, settings: PolicySettings | None, why: str) -> None:
        """Changes the setting that holds here."""
        present = self.present
        present.settings, present.why = settings, why

    def mark(self) -> None:
        """Has Keras's policy in this thread be that of the setting that holds here."""
        present, own = self.present, self._own_thread()
        if present.settings is None:
            return
        with self._lock:
            present.threads[threading.get_ident()] = own
        own.state.mark(present.settings, present.settings.policy)

    def tell_threads(self, before: PolicySettings | None) -> None:
        """Has all threads that were under `before` be under the present settings.

        One that is inside a block hears of it at the end of that.
        """
        present = self.present
        with self._lock:
            known = dict(present.threads)
            if present.settings is None:
                present.threads = {}
        for number, (state, policy) in known.items():
            if number == threading.get_ident():
                state = layers.ThreadState()  # `clear_session` may have changed it
            elif state.settings is not before:
                continue
            if present.settings is not None:
                policy = present.settings.policy
            state.mark(present.settings, policy)

    @contextlib.contextmanager
    def block(self, **changes: Any) -> Iterator[None]:
        """Gives the block a setting of its own: the present one with `changes`.

        Afterwards Keras's policy in this thread is the one that was, or the one that
        came into force meanwhile.
        """
        own, before = self._own_thread(), layers.ThreadState()
        marked, policy = before.settings, before.policy
        threads = {threading.get_ident(): own}
        inner = dataclasses.replace(self.present, **changes, threads=threads)
        blocks = _BLOCKS.get()
        with self._lock:
            self._num_blocks += 1
        _BLOCKS.set((*blocks, inner))
        try:
            yield
        finally:
            _BLOCKS.set(blocks)
            with self._lock:
                self._num_blocks -= 1
            if self.settings is not None and self.owns_thread:
                self.mark()
            elif marked is not None and marked is not self.settings:
                layers.mark(None, own.policy_before)  # another thread called `disable`
            else:
                layers.mark(None, policy)

    def _own_thread(self) -> _Thread:
        known = self.present.threads.get(threading.get_ident())
        state = layers.ThreadState()
        return _Thread(state, state.policy if known is None else known.policy_before)


IN_FORCE = InForce()


_warned_policies: set[str] = set()


@contextlib.contextmanager
def policy_in_force() -> Iterator[None]:
    """Has Keras's global policy be the one in force inside the block.

    `keras.utils.clear_session()` resets it, and a new thread starts without it. The
    thread that enabled tfamp keeps it; another one would not hear of `disable`.
    """
    settings = IN_FORCE.settings
    if settings is None or layers.is_marked(settings):
        yield
        return
    if IN_FORCE.owns_thread:
        IN_FORCE.mark()
        yield
        return
    before = layers.present_policy()
    layers.mark(settings, settings.policy)
    try:
        yield
    finally:
        layers.mark(None, before)


@contextlib.contextmanager
def stock_policy(policy: str | keras.DTypePolicy) -> Iterator[None]:
    """Leaves layers that are made inside the block to Keras, under a policy of its own.

    The same policy set while tfamp is enabled would be tfamp's.
    """
    with IN_FORCE.block(settings=None, why=NOT_ENABLED):
        keras.config.set_dtype_policy(policy)
        yield


def is_in_force(policy: str) -> bool:
    """States whether new layers come under the policy of this name."""
    settings = IN_FORCE.settings
    if settings is None:
        return False
    return policy in (settings.policy.name, IN_FORCE.present.loaded)


def warn_of_foreign_policy(policy: keras.DTypePolicy | None) -> None:
    """Warns once of a policy that other code set while tfamp was enabled."""
    name = "float32" if policy is None else policy.name
    if name in _warned_policies:
        return
    _warned_policies.add(name)
    warnings.warn(
        f"Keras's global policy was set to {name!r} by other code while tfamp was "
        "enabled, so new layers take it and tfamp's rules do not act on them. Leave "
        f"that line out, or name the policy in `tfamp.enable({name!r})`; for some "
        "layers alone use `tfamp.scope(...)`.",
        UserWarning,
        stacklevel=checks.level_of_user(),
    )


def forget_warnings() -> None:
    """Lets each warning be given once more, as after `enable`."""
    _warned_policies.clear()
