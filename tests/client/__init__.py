"""The client against brokers that obey the test, against ours, and against NSQ's own."""
