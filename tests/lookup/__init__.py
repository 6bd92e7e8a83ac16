"""nsqlookupd: its registry, its sockets, and NSQ's own programs with it."""
