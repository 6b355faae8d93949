"""What a `LossScaleOptimizer` needs around `fit`: guarded state, losses, advice."""
