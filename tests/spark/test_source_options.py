"""What users write, read: every wrong option is one sentence that says what would be right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flintmq.errors import OptionError
from flintmq.spark.shipped.options import OPTIONS, Start, check_names, read_sink_options, read_source_options

WHERE = {"nsq.nsqd.addresses": "127.0.0.1:4150"}
SOURCE = {**WHERE, "subscribe": "orders"}
SINK = {**WHERE, "topic": "orders"}
DOCS = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


def read(**more):
    return read_source_options({**SOURCE, **more}, streaming=True)


def test_defaults_are_those_of_the_documents():
    found = read()
    assert (found.topics, found.mode, found.starting, found.fail_on_data_loss) == (("orders",), "auto", None, True)
    assert (found.max_messages, found.max_bytes, found.min_messages, found.max_delay) == (0, 0, 0, 900.0)
    assert (found.spool_max_bytes, found.spool_in_flight, found.spool_flush_interval) == (1 << 30, 20_000, 0.5)
    assert (found.network.retries, found.network.timeout, found.batch_rows) == (3, 30.0, 10_000)


def test_every_option_is_in_the_documents_with_its_default():
    text = DOCS.read_text()
    for option in OPTIONS:
        row = re.search(rf"^\| `{re.escape(option.name)}` \|.*$", text, re.MULTILINE)
        assert row, option.name
        assert not option.default or option.default in row[0], option.name


def test_keys_may_be_written_in_any_case():
    # Spark hands them over in lower case.
    lower = {key.lower(): value for key, value in {**SOURCE, "maxMessagesPerTrigger": "5"}.items()}
    assert read_source_options(lower, streaming=True).max_messages == 5


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("maxMesagesPerTrigger", "maxMessagesPerTrigger"),
        ("startingoffset", "startingOffsets"),
        ("nsq.lookupd.addresses", "nsq.lookupd.http.addresses"),
        ("nsq.nsqd.adresses", "nsq.nsqd.addresses"),
        ("subscribe_pattern", "subscribePattern"),
    ],
)
def test_a_misspelt_option_is_told_with_the_nearest_right_one(given, nearest):
    with pytest.raises(OptionError, match=f"no option {given}: did you mean {nearest}\\?$"):
        check_names({given: "x"})


def test_an_option_that_is_like_none_leads_to_the_documents():
    with pytest.raises(OptionError, match=r"no option zzz; all of them are in docs/spark\.md"):
        check_names({"zzz": "x"})


def test_a_path_is_no_topic():
    with pytest.raises(OptionError, match="takes no path"):
        check_names({"path": "/orders"})


def test_an_option_of_the_other_side_is_refused():
    with pytest.raises(OptionError, match="mpubMaxBytes is an option of the sink, not of the source"):
        read(mpubMaxBytes="5")
    with pytest.raises(OptionError, match="subscribe is an option of the source, not of the sink"):
        read_sink_options({**SINK, "subscribe": "t"})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nsq.nsqd.addresses": ""}, "say where the brokers are"),
        ({"nsq.lookupd.http.addresses": "a:1"}, "not both"),
        ({"nsq.nsqd.addresses": "localhost"}, "each address is host:port"),
        ({"nsq.nsqd.addresses": "http://localhost:4151"}, "each address is host:port"),
        ({"subscribe": ""}, "which topics to read"),
        ({"subscribePattern": "a.*"}, "which topics to read"),
        ({"subscribe": "", "subscribePattern": "("}, "no regular expression"),
        ({"subscribe": "orders, no topic"}, '"no topic" is no name of a topic'),
        ({"mode": "stream"}, "none of auto, log, spool"),
        ({"mode": "spool"}, "name it by the option channel"),
        ({"mode": "log", "channel": "c"}, "log mode reads without a channel"),
        ({"mode": "spool", "channel": "c", "startingOffsets": "latest"}, "a channel knows where it stands"),
        ({"channel": "no channel"}, "no name of a channel"),
        ({"startingOffsets": "soon"}, "neither earliest, latest nor JSON"),
        ({"startingOffsets": '{"orders": 5}'}, "neither earliest, latest nor JSON"),
        ({"startingOffsets": '{"orders": {"n": "5"}}'}, "neither earliest, latest nor JSON"),
        ({"startingOffsets": "latest", "startingTimestamp": "5"}, "exclude each other"),
        ({"startingTimestamp": "2026-01-01"}, "no time such as"),
        ({"startingTimestamp": "2026-01-01T00:00:00"}, "no time such as"),
        ({"endingOffsets": "latest"}, "a stream has no end"),
        ({"endingTimestamp": "2026-01-01T00:00:00Z"}, "a stream has no end"),
        ({"maxMessagesPerTrigger": "0"}, "no whole number from 1 on"),
        ({"maxMessagesPerTrigger": "1e6"}, "no whole number from 1 on"),
        ({"maxMessagesPerTrigger": "5", "maxOffsetsPerTrigger": "6"}, "the same"),
        ({"minMessagesPerTrigger": "6", "maxMessagesPerTrigger": "5"}, "must not be above"),
        ({"maxBytesPerTrigger": "lots"}, "no size such as"),
        ({"maxTriggerDelay": "soon"}, "no duration such as"),
        ({"failOnDataLoss": "maybe"}, "neither true nor false"),
        ({"nsq.compression": "snappy"}, "say deflate"),
        ({"nsq.tls.key": "k"}, "name that by nsq.tls.cert"),
        ({"readerName": "no name"}, "make a name"),
    ],
)
def test_a_wrong_value_is_told_in_one_sentence(options, sentence):
    with pytest.raises(OptionError) as caught:
        read(**options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_has_no_limits_per_trigger():
    with pytest.raises(OptionError, match="a batch reads its whole range: maxMessagesPerTrigger is for streams"):
        read_source_options({**SOURCE, "maxMessagesPerTrigger": "5"}, streaming=False)


def test_a_batch_of_a_spool_needs_nothing_but_its_folder():
    found = read_source_options({"mode": "spool", "spoolLocation": "file:///tmp/x"}, streaming=False)
    assert found.spool_location == "/tmp/x"
    with pytest.raises(OptionError, match=r"flintmq\.spark\.drain\(\)"):
        read_source_options({**SOURCE, "mode": "spool", "channel": "c"}, streaming=False)


@pytest.mark.parametrize("where", ["hdfs://name:8020/spool", "s3a://bucket/spool"])
def test_a_spool_is_on_no_store(where):
    for streaming in (True, False):
        with pytest.raises(OptionError, match=f"spoolLocation: {where} is a URI.*a folder that all machines"):
            read_source_options(
                {**SOURCE, "mode": "spool", "channel": "c", "spoolLocation": where}, streaming=streaming
            )


def test_values_are_read():
    found = read(
        subscribe="orders, payments,orders",
        maxOffsetsPerTrigger="7",
        maxBytesPerTrigger="64m",
        maxTriggerDelay="1m30s",
        startingTimestamp="2026-01-31T08:00:00.000001Z",
        **{"spool.flushIntervalMs": "20"},
    )
    assert found.topics == ("orders", "payments")
    assert (found.max_messages, found.max_bytes, found.max_delay) == (7, 64 << 20, 90.0)
    assert found.starting == Start("time", time=1_769_846_400_000_001_000)
    assert found.spool_flush_interval == 0.02
    assert read(startingTimestamp="1769846400000").starting == Start("time", time=1_769_846_400_000_000_000)
    # Times that no message has: brokers would not take them for times.
    for early in ("0001-01-01T00:00:00Z", "1969-12-31T23:59:59Z"):
        assert read(startingTimestamp=early).starting == Start("time", time=0)
    for late in ("9999-12-31T00:00:00Z", "9999999999999999"):
        assert read(startingTimestamp=late).starting == Start("time", time=2**63 - 1)


def test_offsets_may_be_short_or_copied_from_a_checkpoint():
    short = read(startingOffsets='{"orders": {"n": 5, "m": -1}}').starting
    assert short == Start("offsets", {"orders": {"n": 5, "m": -1}})
    copied = read(startingOffsets='{"v": 1, "mode": "log", "p": {"orders": {"n": {"e": "x", "o": 5}}}}').starting
    assert copied == Start("offsets", {"orders": {"n": 5}})


def test_a_pattern_matches_whole_names():
    found = read_source_options({**WHERE, "subscribePattern": "orders.*|pay"}, streaming=True)
    assert [name for name in ("orders", "orders-eu", "pay", "payments", "my-orders") if found.wants(name)] == [
        "orders",
        "orders-eu",
        "pay",
    ]


def test_secrets_are_in_no_text():
    found = read(**{"nsq.auth.secret": "hush", "nsq.http.token": "hush"})
    assert "hush" not in repr(found)
    assert (found.network.auth_secret, found.network.http_token) == ("hush", "hush")


def test_sink_options_are_read():
    found = read_sink_options({**SINK, "mpubMaxMessages": "10", "mpubMaxBytes": "1k", "idempotent": "TRUE"})
    assert (found.topic, found.max_messages, found.max_bytes, found.idempotent) == ("orders", 10, 1024, "true")
    with pytest.raises(OptionError, match="none of auto, true, false"):
        read_sink_options({**SINK, "idempotent": "perhaps"})
    with pytest.raises(OptionError, match="no name of a topic"):
        read_sink_options({**SINK, "topic": "a b"})


@pytest.mark.parametrize(
    "more", [{}, {"path": "file:/warehouse/t", "location": "file:/warehouse/t", "external": "true"}]
)
def test_what_a_catalog_notes_of_a_table_is_no_option(more):
    """As CREATE TABLE hands it over: each option twice, among keys of Spark's own and any that somebody made up."""
    options = {"subscribe": "orders", "nsq.nsqd.addresses": "a:1"}
    marked = {f"option.{key}": value for key, value in options.items()}
    noted = {"provider": "nsq", "owner": "root", "comment": "hello", "made.by": "somebody", **more}
    check_names({**options, **marked, **noted})
    assert read_source_options({**options, **marked, **noted}, streaming=False) == read_source_options(
        options, streaming=False
    )
    hive = {"serialization.format": "1", "transient_lastDdlTime": "1794794400", "path": "/warehouse/t"}
    assert read_source_options({**options, **hive}, streaming=False) == read_source_options(options, streaming=False)
    with pytest.raises(OptionError, match="did you mean subscribe"):
        check_names({**noted, "subscribee": "x", "option.subscribee": "x"})
    with pytest.raises(OptionError, match="takes no path"):
        check_names({**options, "path": "/some/path"})
    for read in (lambda: read_source_options({}, streaming=False), lambda: read_sink_options({})):
        with pytest.raises(OptionError, match=r"SELECT … FROM t WITH .*TEMPORARY VIEW"):
            read()
