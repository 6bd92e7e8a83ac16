"""Simulated time, network and event loops, and the programs that are tried on them.

``world``, ``network`` and ``loop`` know nothing of what runs on them; ``nodes`` are scripted nsqds and nsqlookupds, and
``client`` tries the client library. ``python -m tests.simulation.client --seeds N --start K`` runs more seeds than the
suite does.
"""
