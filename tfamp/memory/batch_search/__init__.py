"""`tfamp.find_batch_size`: the batch that trains fastest in the memory there is."""
