"""Int8: which layers it would spoil, simulated, and the fewest that stay in float."""
