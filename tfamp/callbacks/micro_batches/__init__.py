"""`MicroBatches`: a batch that does not fit, trained in parts."""
