"""Conformance of the TCP protocol and the HTTP API: cases, the Go daemon's answers to them, and a replay against ours.

``notation``  what a case is made of
``cases``     the cases: what is sent and what should come back
``play``      runs daemons, plays cases against them and writes down the answers
``record``    ``python -m tests.conformance.record --nsqd PATH`` writes ``recorded.json`` from a Go daemon
``test_tcp``  replays every case and compares with the recording

``http_cases``, ``http_play``, ``record_http``, ``test_http`` and ``recorded_http.json`` are the same for the HTTP API.
The same for nsqlookupd, over TCP and HTTP: ``lookup_notation``, ``lookup_cases``, ``lookup_play``, ``lookup_record``,
``test_lookup``.
"""
