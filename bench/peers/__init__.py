"""The comparison of brokers: flintmq beside nsqd, JetStream, Redis, RabbitMQ and Kafka. ``python -m bench --peers``.

``systems`` starts each broker, ``load`` (a Go program) is the client of all, ``measure`` makes the runs, ``report``
turns them into tables and charts. ``python -m bench.durable`` uses the first two as well.
"""
