"""nsqlookupd: where consumers find out which nsqds have a topic."""
