"""`tfamp.estimate_memory`: what a step will hold, before it runs."""
