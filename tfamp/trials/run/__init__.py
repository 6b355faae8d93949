"""What happens in the process of one run."""
