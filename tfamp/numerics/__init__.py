"""What a model's numbers do: which dtype each product runs in, and why."""
