"""The broker's HTTP API, one module per group of routes."""
