"""`tfamp.compare`: float32 against a policy, measured, judged and written up."""
