"""`tfamp bench_serve`: latencies of a server at rates that do not wait for it."""
