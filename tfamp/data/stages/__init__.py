"""What a pipeline does to its elements: a file for each stage, and what they share."""
