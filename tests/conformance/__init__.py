"""Conformance of the TCP protocol: cases, what the Go daemon answered to them, and a replay against our broker.

``notation``  what a case is made of
``cases``     the cases: what is sent and what should come back
``play``      runs daemons, plays cases against them and writes down the answers
``record``    ``python -m tests.conformance.record --nsqd PATH`` writes ``recorded.json`` from a Go daemon
``test_tcp``  replays every case and compares with the recording
"""
