"""Topics that an archive query subscribes to, as the commits of its table tell them.

A query may subscribe to topics that do not exist yet. Its offsets do not name these; its subscription does.
"""

from __future__ import annotations

import json
import re

from flintmq.errors import OptionError
from flintmq.spark.pipelines import common
from flintmq.spark.shipped.options import read_source_options

__all__ = ["covers", "subscription_of"]


def subscription_of(source: common.Source) -> str:
    """Return the subscription of a source as JSON; nothing if only the source itself knows it."""
    topics = getattr(source, "__self__", None)
    if not isinstance(topics, common.Topics):
        return ""
    try:
        read = read_source_options(topics.all_options, streaming=True)
    except OptionError:
        return ""  # the stream says so when it begins
    return json.dumps({"topics": list(read.topics)} if read.topics else {"pattern": read.pattern})


def covers(subscription: str, topic: str) -> bool | None:
    """Does a subscription include this topic? None if it is not known, or not of a form that we know."""
    try:
        said = json.loads(subscription)
        if "topics" in said:
            return topic in said["topics"]
        return re.fullmatch(said["pattern"], topic) is not None
    except (ValueError, KeyError, TypeError, re.error):
        return None
