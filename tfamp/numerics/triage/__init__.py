"""`tfamp.triage`: why a step failed."""
