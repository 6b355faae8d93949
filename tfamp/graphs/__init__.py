"""What TensorFlow will compute, read from traced graphs and compiled programs."""
