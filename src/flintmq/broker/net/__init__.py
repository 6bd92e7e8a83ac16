"""Connections of the broker: sockets, sessions and their commands, TLS, authorization."""
