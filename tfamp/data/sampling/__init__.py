"""Which examples an epoch takes: balanced, weighted, or a part of them."""

from tfamp.data.sampling.balance import make_balance as make_balance
from tfamp.data.sampling.subset import make_subset as make_subset
from tfamp.data.sampling.weights import make_weights as make_weights
