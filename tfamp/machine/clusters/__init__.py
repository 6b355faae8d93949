"""Clusters of workers, as the programs that start them describe them."""
