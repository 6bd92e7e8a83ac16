"""Other clients' names on top of ours, so that a program moves by changing an import."""
