"""What this machine has: devices and their speeds, memory and its limits."""
