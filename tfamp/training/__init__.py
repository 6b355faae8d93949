"""What training takes: memory traded for time."""
