"""NSQ's bytes without I/O: commands, frames, compression."""
