"""Topics and channels: who gets which message, and when."""
