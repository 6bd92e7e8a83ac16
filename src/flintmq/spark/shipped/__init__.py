"""Modules that travel to Spark's executors: standard library and pyarrow only."""
