"""The benchmark: our broker and another NSQ daemon, side by side in one run. Start with ``python -m bench``."""
