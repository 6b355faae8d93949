"""`tfamp.prove`: the dtype that each product of a step runs in."""
