"""Other NSQ client libraries against our broker and the Go daemon, in real processes. See README.md."""
