"""Statistics of the broker: /stats, Prometheus, statsd."""
