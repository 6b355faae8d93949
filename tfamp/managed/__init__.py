"""What tfamp does to a managed layer or model, from its making to its saving."""
