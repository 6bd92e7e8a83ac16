"""The sink of ``format("nsq")``: rows become messages, each exactly once where the brokers can stage.

writers      what Spark calls: checks, the choice between staging and publishing
chunks       rows cut into the bodies of MPUBs
staging      a task's side: rows stored invisibly under (producer, transaction, attempt)
commit       the driver's side: which attempts count, one decision, rows made visible
home         which broker keeps a query's decisions
publisher    at least once, over TCP, for brokers that cannot stage
"""

from __future__ import annotations

from flintmq.spark.sink.writers import BatchWriter, StreamWriter

__all__ = ["BatchWriter", "StreamWriter"]
