"""The rules of the linter, in the order of the documentation."""

from tfamp.numerics.lint.backends import failing_remat, missing_kernel, unaligned_shapes
from tfamp.numerics.lint.constants import (
    constant_range,
    optimizer_epsilon,
    vanishing_epsilon,
)
from tfamp.numerics.lint.heads import half_head, half_loss
from tfamp.numerics.lint.inputs import float_ids, unnormalised_input
from tfamp.numerics.lint.layers import (
    added_loss,
    overflowing_norm,
    shifted_normalization,
    unscaled_attention,
)
from tfamp.numerics.lint.loss_scales import unscaled_float16, unscaled_train_step
from tfamp.numerics.lint.policies import half_weights, late_policy
from tfamp.numerics.lint.reductions import long_reduction
from tfamp.numerics.lint.rule import LintRule
from tfamp.numerics.lint.updates import lost_updates, rounded_momentum

RULES: tuple[LintRule, ...] = (
    half_head,
    half_loss,
    late_policy,
    unscaled_float16,
    unscaled_train_step,
    half_weights,
    optimizer_epsilon,
    rounded_momentum,
    lost_updates,
    vanishing_epsilon,
    constant_range,
    long_reduction,
    overflowing_norm,
    unscaled_attention,
    shifted_normalization,
    unnormalised_input,
    float_ids,
    added_loss,
    missing_kernel,
    failing_remat,
    unaligned_shapes,
)
RULE_IDS: tuple[str, ...] = tuple(rule.id for rule in RULES)
