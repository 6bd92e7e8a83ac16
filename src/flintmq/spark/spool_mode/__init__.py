"""The Spark source that spools messages of any NSQ server."""
