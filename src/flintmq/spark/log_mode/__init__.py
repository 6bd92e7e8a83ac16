"""The Spark source that reads topic logs."""
