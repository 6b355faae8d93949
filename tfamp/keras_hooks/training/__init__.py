"""What stands around a model's training function."""
