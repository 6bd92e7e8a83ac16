"""Simulated time, network, machines and event loops, and the programs that are tried on them.

``world``, ``network`` and ``loop`` know nothing of what runs on them. Two things do:

    client     the client library, against scripted nsqds and nsqlookupds (``nodes``)
    brokers    real nsqds and nsqlookupds (``cluster``) on simulated machines (``machine``), used by scripted clients
               (``actors``) who write down what they know (``ledger``); ``inside`` looks at the brokers themselves

``python -m tests.simulation.client --seeds N --start K`` and ``python -m tests.simulation --seed K --seeds N`` run more
seeds than the suite does. ``test_contract`` compares simulated sockets, epoll and files with the real ones.
"""
