"""Staged publishes: messages are stored, invisible to everybody, until a decision makes them part of their topics."""
