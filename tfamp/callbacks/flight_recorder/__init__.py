"""`FlightRecorder`: the last steps before a failure, to replay them."""
