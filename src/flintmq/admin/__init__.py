"""nsqadmin: the cluster as people and scripts see it, and what they do to it."""
