"""nsqd: the broker."""
