"""What a run of a comparison is trained under, as one word that can be typed."""

import dataclasses

from tfamp.records import checks
from tfamp.records.record import Record

# As `tfamp.enable` takes them.
POLICIES = (
    *("auto", "float32", "mixed_float16", "mixed_bfloat16"),
    *("float16", "bfloat16"),
)
_OPTIONS = ("xla", "rewrite", "no_rules")
_STOCK = "keras:"


@dataclasses.dataclass(frozen=True)
class Variant(Record):
    """A policy, and how a model runs under it.

    Args:
        policy: A policy's name, as for `tfamp.enable`.
        is_stock: Whether Keras alone sets the policy, without tfamp.
        jit_compile: Whether XLA compiles the model, whatever `compile` was told.
        rewrite: Whether TensorFlow rewrites graphs for bfloat16 on CPUs besides.
        has_rules: Whether the default rules keep layers in float32.

    Example:
        >>> Variant.parse("keras:mixed_bfloat16+xla").jit_compile
        True
        >>> str(Variant("mixed_bfloat16", has_rules=False))
        'mixed_bfloat16+no_rules'
    """

    policy: str
    is_stock: bool = False
    jit_compile: bool = False
    rewrite: bool = False
    has_rules: bool = True

    @classmethod
    def parse(cls, text: object, argument: str = "policies") -> "Variant":
        """Returns the variant that a word stands for.

        Args:
            text: `[keras:]policy[+xla][+rewrite][+no_rules]`.
            argument: What it was given as, for the message.

        Raises:
            TypeError: It is no text.
            ValueError: The policy or an option is unknown, or has no effect here.
        """
        if not isinstance(text, str):
            raise TypeError(
                f"`{argument}` holds {text!r}, of type {type(text).__name__}; expected "
                "names of policies, such as 'mixed_bfloat16' or 'float32+xla'."
            )
        word, *options = text.strip().split("+")
        is_stock = word.startswith(_STOCK)
        policy = checks.choice(argument, word.removeprefix(_STOCK), POLICIES)
        for option in options:
            checks.choice(f"{argument} option", option, _OPTIONS)
        found = cls(
            policy,
            is_stock=is_stock,
            jit_compile="xla" in options,
            rewrite="rewrite" in options,
            has_rules="no_rules" not in options,
        )
        if is_stock and (policy == "auto" or not found.has_rules):
            what = "policy 'auto'" if policy == "auto" else "rules to leave out"
            raise ValueError(
                f"`{argument}` holds {text!r}, but stock Keras has no {what}; expected "
                "a policy of Keras after 'keras:'. Leave 'keras:' or the option out."
            )
        return found

    @property
    def is_float32(self) -> bool:
        """Whether it can be what others are compared with: nothing in half."""
        return self.policy == "float32" and not self.rewrite

    def __str__(self) -> str:
        """Returns the word that `parse` reads."""
        options = {
            "xla": self.jit_compile,
            "rewrite": self.rewrite,
            "no_rules": not self.has_rules,
        }
        words = [self.policy, *(name for name, is_on in options.items() if is_on)]
        return (_STOCK if self.is_stock else "") + "+".join(words)
