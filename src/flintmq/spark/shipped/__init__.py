"""Modules that travel to Spark's executors: standard library and pyarrow only.

Object stores need deltalake there, and message bodies the library of their format.
"""
