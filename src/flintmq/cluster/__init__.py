"""Lookupds and nodes as seen over HTTP."""
