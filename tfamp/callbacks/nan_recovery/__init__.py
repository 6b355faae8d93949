"""`NanRecovery`: goes back to the last good state after a failure."""
