"""Flags, config file, durations, help and docs: all read the one table."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import OptionError
from flintmq.options import (
    BOOL,
    DURATION,
    FLOAT,
    HOUR,
    INT,
    MILLISECOND,
    MINUTE,
    PERCENTILES,
    SECOND,
    STRING,
    STRINGS,
    NsqadminOptions,
    NsqdOptions,
    NsqlookupdOptions,
    Option,
    default_node_id,
    format_duration,
    help_text,
    option_table,
    parse,
    parse_duration,
    read_flags,
    resolve,
)
from support.peers import GO_NSQD

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "deploy" / "nsqd.toml"
EXAMPLE_OF_NSQLOOKUPD = ROOT / "deploy" / "nsqlookupd.cfg.example"
EXAMPLE_OF_NSQADMIN = ROOT / "deploy" / "nsqadmin.toml"


def nsqd(*argv: str) -> NsqdOptions:
    return parse(NsqdOptions, argv)


@pytest.fixture
def config(tmp_path):
    """Options from a config file with the given text, under the given flags."""

    def read(text: str, *argv: str) -> NsqdOptions:
        path = tmp_path / "nsqd.cfg"
        path.write_text(text)
        return nsqd(f"--config={path}", *argv)

    return read


# --- Durations

DURATIONS = [
    ("0", 0, "0s"),
    ("0s", 0, "0s"),
    ("5s", 5 * SECOND, "5s"),
    ("250ms", 250 * MILLISECOND, "250ms"),
    ("1h", HOUR, "1h0m0s"),
    ("1h0m0s", HOUR, "1h0m0s"),
    ("90s", 90 * SECOND, "1m30s"),
    ("2h5s", 2 * HOUR + 5 * SECOND, "2h0m5s"),
    ("1.5s", 1_500_000_000, "1.5s"),
    ("-1s", -SECOND, "-1s"),
    ("-1.5h", -90 * MINUTE, "-1h30m0s"),
    ("+5s", 5 * SECOND, "5s"),
    ("100ns", 100, "100ns"),
    ("1.5us", 1_500, "1.5µs"),
    ("1.5µs", 1_500, "1.5µs"),
    ("1.5μs", 1_500, "1.5µs"),
    ("749.280078ms", 749_280_078, "749.280078ms"),
    (".5s", 500 * MILLISECOND, "500ms"),
    ("5.s", 5 * SECOND, "5s"),
    ("0.0000000001s", 0, "0s"),
    ("2562047h47m16.854775807s", 2**63 - 1, "2562047h47m16.854775807s"),
]


@pytest.mark.parametrize(("text", "nanoseconds", "printed"), DURATIONS)
def test_durations_are_read_and_printed_as_in_go(text, nanoseconds, printed):
    assert parse_duration(text) == nanoseconds
    assert format_duration(nanoseconds) == printed


@pytest.mark.parametrize("text", ["", "-", "5", "s", ".s", ".", "5x", "1h5", "1s ", " 1s", "1 s", "--1s", "1e3s", "٣s"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_a_duration_beyond_64_bits_is_refused():
    with pytest.raises(ValueError, match="too long"):
        parse_duration("2562047h47m16.854775808s")


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_a_printed_duration_reads_as_itself(nanoseconds):
    assert parse_duration(format_duration(nanoseconds)) == nanoseconds


# --- Flags


@pytest.mark.parametrize(
    "argv",
    [["-mem-queue-size", "7"], ["-mem-queue-size=7"], ["--mem-queue-size", "7"], ["--mem-queue-size=7"]],
)
def test_a_flag_may_have_one_or_two_dashes_and_a_space_or_an_equals_sign(argv):
    assert nsqd(*argv).mem_queue_size == 7


def sample(entry: Option) -> tuple[str, object]:
    """A text that is not the flag's default, and its value."""
    if entry.kind.words is not None:
        text = next(word for word in reversed(entry.kind.words) if word != entry.default)
        return text, text
    samples: dict[object, tuple[str, object]] = {
        STRING: ("a b=c", "a b=c"),
        INT: ("17", 17),
        FLOAT: ("0.75", 0.75),
        BOOL: ("false", False) if entry.default else ("true", True),
        DURATION: ("1m1.5s", 61_500 * MILLISECOND),
        STRINGS: ("host:1", ("host:1",)),
        PERCENTILES: ("0.5", (0.5,)),
    }
    return samples[entry.kind]


SETTINGS = [entry for entry in option_table(NsqdOptions).values() if entry.key is not None]


@pytest.mark.parametrize("entry", SETTINGS, ids=lambda entry: entry.flag)
def test_every_flag_is_read_in_every_form_and_from_the_file(entry, tmp_path):
    text, value = sample(entry)
    assert entry.default != value
    forms = [[f"-{entry.flag}={text}"], [f"--{entry.flag}={text}"]]
    if entry.kind.bare:
        assert read_flags(NsqdOptions, [f"--{entry.flag}"]) == {entry.flag: True if entry.kind is BOOL else "true"}
    else:
        forms += [[f"-{entry.flag}", text], [f"--{entry.flag}", text]]
    for argv in forms:
        assert getattr(resolve(NsqdOptions, read_flags(NsqdOptions, argv)), entry.key) == value
    path = tmp_path / "nsqd.toml"
    path.write_text(f'{entry.key} = "{text}"\n')
    assert getattr(resolve(NsqdOptions, {"config": str(path)}), entry.key) == value


needs_go = pytest.mark.skipif(not GO_NSQD.exists(), reason=f"no Go nsqd at {GO_NSQD}: run scripts/peers")


def go(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GO_NSQD, *argv], capture_output=True, text=True, timeout=60, check=False)


@needs_go
def test_every_flag_of_the_real_nsqd_is_there_with_its_default():
    found = re.findall(
        r"^  -([a-z0-9-]+)(?: (\w+))?\n.*?(?: \(default ([^()]*)\))?$", go("--help").stderr, re.MULTILINE
    )
    table = option_table(NsqdOptions)
    assert len(found) > 50
    for flag, kind, default in found:
        entry = table[flag]
        if kind in ("int", "string", "duration"):
            assert entry.kind is {"int": INT, "string": STRING, "duration": DURATION}[kind], flag
        if flag == "tls-min-version":
            continue  # newer on purpose
        shown = default.strip('"').lower()
        if not shown or "unlimited" in shown:
            shown = {"int": "0", "duration": "0s", "string": ""}.get(kind, "false" if entry.kind.bare else "")
        ours = entry.kind.to_text(entry.default)
        assert ours.lower() == shown, flag


@needs_go
@pytest.mark.parametrize("dashes", ["-", "--"])
@pytest.mark.parametrize("equals", [True, False])
def test_the_real_nsqd_reads_the_same_command_line(dashes, equals):
    flags = set(re.findall(r"^  -([a-z0-9-]+)", go("--help").stderr, re.MULTILINE))
    argv = []
    for entry in SETTINGS:
        if entry.flag in flags:
            text, _ = sample(entry)
            joined = equals or entry.kind.bare
            argv += [f"{dashes}{entry.flag}={text}"] if joined else [f"{dashes}{entry.flag}", text]
    assert len(argv) > 40
    result = go(*argv, "--version")
    assert (result.returncode, result.stderr) == (0, "")
    read_flags(NsqdOptions, [*argv, "--version"])


@needs_go
@pytest.mark.parametrize(
    "word",
    """--tls-min-version=ssl3.0 --log-level=loud --tls-required=foo --deflate=maybe --statsd-interval=1
    --mem-queue-size=1e3 --mem-queue-size=08 --msg-timeout=5 --max-bytes-per-file=9223372036854775808 --worker-id=3
    --nope ---x -=x --config""".split(),
)
def test_the_real_nsqd_refuses_the_same_words(word):
    assert go(word).returncode == 2
    with pytest.raises(OptionError):
        read_flags(NsqdOptions, [word])


def test_the_value_of_a_flag_may_look_like_a_flag_or_be_empty():
    options = nsqd("--log-prefix", "--x", "--http-address=", "--statsd-prefix=a=b")
    assert (options.log_prefix, options.http_address, options.statsd_prefix) == ("--x", "", "a=b")


def test_the_last_of_two_equal_flags_wins():
    assert nsqd("--mem-queue-size=1", "--mem-queue-size=2").mem_queue_size == 2


@pytest.mark.parametrize("word", ["1", "t", "T", "TRUE", "true", "True"])
def test_booleans_take_go_s_words(word):
    assert nsqd(f"--statsd-exclude-ephemeral={word}").statsd_exclude_ephemeral is True


def test_a_bare_boolean_is_true_and_never_takes_the_next_word():
    # "false" is then the first word that is no flag, and ends them.
    options = nsqd("--statsd-exclude-ephemeral", "false", "--mem-queue-size=7")
    assert options.statsd_exclude_ephemeral is True
    assert options.mem_queue_size == 10_000


@pytest.mark.parametrize("end", ["--", "-", "word", ""])
def test_flags_end_at_the_first_other_word(end):
    options = nsqd("--mem-queue-size=7", end, "--sync-every=9", "--no-such-flag")
    assert (options.mem_queue_size, options.sync_every) == (7, 2500)


def test_repeatable_flags_add_up_and_commas_do_not_split_them():
    options = nsqd("--lookupd-tcp-address=a:1", "-lookupd-tcp-address", "b:2,c:3")
    assert options.nsqlookupd_tcp_addresses == ("a:1", "b:2,c:3")


def test_percentiles_may_be_repeated_or_have_commas_and_are_kept_from_high_to_low():
    options = nsqd("--e2e-processing-latency-percentile=0.5,0.99", "--e2e-processing-latency-percentile", "1.0")
    assert options.e2e_processing_latency_percentiles == (1.0, 0.99, 0.5)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "false"),
        (["--tls-required"], "true"),
        (["--tls-required=0"], "false"),
        (["--tls-required=TCP-https"], "tcp-https"),
    ],
)
def test_tls_required_is_a_boolean_with_a_third_word(argv, expected):
    options = resolve(NsqdOptions, read_flags(NsqdOptions, argv))
    assert options.tls_required == expected


@pytest.mark.parametrize(
    ("text", "value"), [("0x10", 16), ("010", 8), ("0b11", 3), ("1_000", 1000), ("+5", 5), ("00", 0)]
)
def test_whole_numbers_are_read_as_in_go(text, value):
    assert nsqd("--mem-queue-size", text).mem_queue_size == value


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--nope"], "flag provided but not defined: -nope"),
        (["--config"], "flag needs an argument: -config"),
        (["---x"], "bad flag syntax: ---x"),
        (["-=x"], "bad flag syntax: -=x"),
        (["--mem-queue-size=abc"], 'invalid value "abc" for flag -mem-queue-size: "abc" is not a whole number'),
        (["--mem-queue-size=08"], 'invalid value "08" for flag -mem-queue-size: "08" is not a whole number'),
        (["--mem-queue-size=9223372036854775808"], "does not fit in 64 bits"),
        (["--deflate=maybe"], 'invalid value "maybe" for flag -deflate: "maybe" is neither true nor false'),
        (["--worker-id=3"], "neither true nor false"),
        (["--sync-timeout=5"], "missing unit"),
        (["--log-level=loud"], '"loud" is none of debug, info, warn, error, fatal'),
        (["--tls-min-version=ssl3.0"], '"ssl3.0" is none of tls1.0, tls1.1, tls1.2, tls1.3'),
        (["--tls-required=foo"], '"foo" is none of false, tcp-https, true'),
        (["--durability=paper"], '"paper" is none of memory, os, fsync'),
        (["--queue-scan-dirty-percent=x"], '"x" is not a number'),
    ],
)
def test_a_wrong_flag_is_one_clear_line(argv, text):
    with pytest.raises(OptionError) as error:
        read_flags(NsqdOptions, argv)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_deprecated_flags_have_no_effect():
    assert nsqd("--verbose", "--worker-id") == nsqd()


# --- Config file


def test_flags_win_over_the_file_and_the_file_over_defaults(config):
    options = config("mem_queue_size = 5\nsync_every = 6\n", "--sync-every=7")
    assert (options.mem_queue_size, options.sync_every, options.max_rdy_count) == (5, 7, 2500)


def test_repeatable_flags_replace_the_file_s_list(config):
    assert config('nsqlookupd_tcp_addresses = ["a:1"]', "--lookupd-tcp-address=b:2").nsqlookupd_tcp_addresses == (
        "b:2",
    )


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("id = 7", "id", 7),
        ('id = "7"', "id", 7),
        ("sync_timeout = 1500", "sync_timeout", 1500 * MILLISECOND),
        ('sync_timeout = "1.5s"', "sync_timeout", 1500 * MILLISECOND),
        ("deflate = false", "deflate", False),
        ('deflate = "false"', "deflate", False),
        # The other way round, as the Go daemon does it.
        ("deflate = 1", "deflate", False),
        ("statsd_exclude_ephemeral = 0", "statsd_exclude_ephemeral", True),
        ('nsqlookupd_tcp_addresses = ["a:1", "b:2"]', "nsqlookupd_tcp_addresses", ("a:1", "b:2")),
        ('nsqlookupd_tcp_addresses = "a:1, b:2"', "nsqlookupd_tcp_addresses", ("a:1", "b:2")),
        ('nsqlookupd_tcp_addresses = ""', "nsqlookupd_tcp_addresses", ()),
        ('auth_http_addresses = ["a:1"]', "auth_http_addresses", ("a:1",)),
        ('enable_experiment = ["x"]', "enable_experiment", ("x",)),
        ("e2e_processing_latency_percentiles = [0.5, 1.0]", "e2e_processing_latency_percentiles", (1.0, 0.5)),
        ("e2e_processing_latency_percentiles = [1]", "e2e_processing_latency_percentiles", (1.0,)),
        ('e2e_processing_latency_percentiles = "0.5,0.9"', "e2e_processing_latency_percentiles", (0.9, 0.5)),
        ("tls_required = false", "tls_required", "false"),
        ("tls_required = 0", "tls_required", "false"),
        ('tls_min_version = "tls1.3"', "tls_min_version", "tls1.3"),
        ('tls_min_version = ""', "tls_min_version", "tls1.2"),
        ('log_level = "WARN"', "log_level", "warn"),
        ("queue_scan_dirty_percent = 1", "queue_scan_dirty_percent", 1.0),
        ("statsd_prefix = 5", "statsd_prefix", "5"),
        ("statsd_prefix = true", "statsd_prefix", "true"),
    ],
)
def test_values_of_the_file_are_coerced_as_in_nsq(config, text, key, value):
    found = getattr(config(text), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "word"), [("tls_required = true", "true"), ('tls_required = "tcp-https"', "tcp-https")]
)
def test_tls_required_in_the_file_is_a_boolean_or_a_word(config, text, word):
    assert config(text, "--tls-cert=c", "--tls-key=k").tls_required == word


def test_keys_nobody_knows_change_nothing_and_so_do_flag_names_and_what_is_no_setting(config):
    assert config('no_such_key = 1\nnode_id = 7\nversion = true\nhelp = "x"\n[table]\nid = 9\n') == nsqd()


def misspelt(key: str) -> set[str]:
    """A letter missing, doubled, swapped with the next; a dash; other case; the flag's own name."""
    middle = len(key) // 2
    swapped = key[: middle - 1] + key[middle] + key[middle - 1] + key[middle + 1 :]
    return {
        key[1:], key[:-1], key[:middle] + key[middle + 1 :], key[:middle] + key[middle] + key[middle:], swapped,
        key.replace("_", "-"), key.upper(), key + "s",
    }  # fmt: skip


@pytest.mark.parametrize("program", [NsqdOptions, NsqlookupdOptions], ids=lambda program: program.program)
def test_a_misspelt_key_is_reported_with_the_key_that_was_meant(program, tmp_path, caplog):
    path = tmp_path / "daemon.cfg"
    known = {entry.key: flag for flag, entry in option_table(program).items() if entry.key is not None}
    for key, flag in known.items():
        for wrong in (misspelt(key) | {flag, flag.replace("-", "_")}) - known.keys() - {""}:
            if len(key) <= 3 and wrong != flag.replace("-", "_"):
                continue  # too short to be recognized
            path.write_text(f'"{wrong}" = 1\n')
            caplog.clear()
            parse(program, [f"--config={path}"])
            assert [(entry.levelname, entry.getMessage()) for entry in caplog.records] == [
                ("WARNING", f"config file {path}: unknown key {wrong} is ignored, did you mean {key}?")
            ]
            with pytest.raises(OptionError) as error:
                parse(program, [f"--config={path}", "--strict-config"])
            assert str(error.value) == (
                f"failed to load config file {path} - unknown key {wrong}, did you mean {key}? (--strict-config is set)"
            )


def test_every_unknown_key_and_table_is_reported(tmp_path, caplog):
    path = tmp_path / "nsqd.cfg"
    path.write_text('mem_queue_sise = 1\nxyzzy = 2\n[topics."orders"]\nmax-messages = 1\n[topic."orders"]\n')
    parse(NsqdOptions, [f"--config={path}"])
    assert [entry.getMessage() for entry in caplog.records] == [
        f"config file {path}: unknown key mem_queue_sise is ignored, did you mean mem_queue_size?",
        f"config file {path}: unknown key xyzzy is ignored",
        f"config file {path}: unknown table [topics] is ignored, did you mean [topic]?",
    ]
    with pytest.raises(OptionError) as error:
        parse(NsqdOptions, [f"--config={path}", "--strict-config"])
    assert str(error.value) == (
        f"failed to load config file {path} - unknown key mem_queue_sise, did you mean mem_queue_size?; "
        "unknown key xyzzy; unknown table [topics], did you mean [topic]? (--strict-config is set)"
    )
    # nsqlookupd has no tables.
    caplog.clear()
    path.write_text('[topic."orders"]\n')
    parse(NsqlookupdOptions, [f"--config={path}"])
    assert [entry.getMessage() for entry in caplog.records] == [f"config file {path}: unknown table [topic] is ignored"]


def test_a_misspelt_flag_is_reported_with_the_flag_that_was_meant():
    with pytest.raises(OptionError) as error:
        nsqd("--mem-queue-sise=1")
    assert str(error.value) == "flag provided but not defined: -mem-queue-sise, did you mean -mem-queue-size?"


def test_keys_that_nsq_deprecated_are_no_mistakes(tmp_path, caplog):
    path = tmp_path / "nsqd.cfg"
    path.write_text("verbose = true\nworker_id = 1\n")
    parse(NsqdOptions, [f"--config={path}", "--strict-config"])
    assert caplog.records == []


def test_the_example_files_have_no_unknown_keys(tmp_path, caplog):
    programs = (NsqdOptions, NsqlookupdOptions, NsqadminOptions)
    for program, example in zip(programs, (EXAMPLE, EXAMPLE_OF_NSQLOOKUPD, EXAMPLE_OF_NSQADMIN), strict=True):
        path = tmp_path / example.name
        path.write_text(re.sub(r"^# (?=[\w-]+ = |\[)", "", example.read_text(), flags=re.MULTILINE))
        parse(program, [f"--config={path}", "--strict-config"])
    assert caplog.records == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bogus", "failed to load config file"),
        ('mem_queue_size = "abc"', 'mem_queue_size: "abc" is not a whole number'),
        ("mem_queue_size = 1.5", "mem_queue_size: a float cannot be its value"),
        ("id = true", "id: a bool cannot be its value"),
        ("sync_timeout = 1.5", "sync_timeout: a float cannot be its value"),
        ('sync_timeout = "abc"', "sync_timeout: invalid duration"),
        ("deflate = 1.0", "deflate: a float cannot be its value"),
        ('deflate = "maybe"', "deflate:"),
        ('log_level = "loud"', "log_level:"),
        ("log_level = 1", "log_level:"),
        ("nsqlookupd_tcp_addresses = [1]", "nsqlookupd_tcp_addresses: a list cannot be its value"),
        ('data_path = ["x"]', "data_path: a list cannot be its value"),
        ('tls_min_version = "x"', "tls_min_version:"),
        ('tls_required = "x"', "tls_required:"),
    ],
)
def test_a_wrong_file_is_one_clear_line_that_names_it(config, text, reason):
    with pytest.raises(OptionError) as error:
        config(text)
    assert str(error.value).startswith("failed to load config file ")
    assert "nsqd.cfg - " in str(error.value)
    assert reason in str(error.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(OptionError, match=r"failed to load config file .*missing\.cfg - No such file or directory"):
        nsqd(f"--config={tmp_path / 'missing.cfg'}")


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    path = tmp_path / "binary.cfg"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="failed to load config file"):
        nsqd(f"--config={path}")


def test_the_example_file_is_read():
    assert nsqd(f"--config={EXAMPLE}").data_path == "/var/lib/nsqd"


def test_the_example_file_shows_known_keys_and_true_defaults(config):
    """With every commented setting switched on it stays valid, and only what must be an example is not the default."""
    text = re.sub(r"^# (?=[\w-]+ = |\[)", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert set(tomllib.loads(text)) <= {entry.key for entry in option_table(NsqdOptions).values()} | {"topic"}
    options = config(text)
    examples = {
        "data_path", "id", "broadcast_address", "nsqlookupd_tcp_addresses", "tls_cert", "tls_key", "tls_required",
        "tls_client_auth_policy", "tls_root_ca_file", "statsd_address", "e2e_processing_latency_percentiles",
        "topic", "config", "tcp_address", "http_address",
    }  # fmt: skip
    defaults = NsqdOptions()
    changed = {key for key in vars(defaults) if getattr(options, key) != getattr(defaults, key)}
    assert changed == examples
    marked = set(re.findall(r"^# (\w+) = .*  # example$", EXAMPLE.read_text(), re.MULTILINE))
    assert marked == examples - {"data_path", "topic", "config", "tcp_address", "http_address"}


# --- Validation

INVALID = [
    ({"max_deflate_level": 0}, "--max-deflate-level must be [1,9]"),
    ({"max_deflate_level": 10}, "--max-deflate-level must be [1,9]"),
    ({"id": -1}, "--node-id must be [0,1024)"),
    ({"id": 1024}, "--node-id must be [0,1024)"),
    ({"tls_required": "true"}, "cannot require TLS client connections without TLS key and cert"),
    ({"tls_required": "tcp-https"}, "cannot require TLS client connections without TLS key and cert"),
    ({"tls_cert": "c"}, "failed to build TLS config - --tls-cert and --tls-key must be given together"),
    ({"tls_client_auth_policy": "requre"}, "--tls-client-auth-policy must be require or require-verify"),
    ({"auth_http_request_method": "GET"}, "--auth-http-request-method must be post or get"),
    ({"e2e_processing_latency_percentiles": (2.0,)}, "invalid E2E processing latency percentile: 2"),
    ({"e2e_processing_latency_percentiles": (0.0,)}, "invalid E2E processing latency percentile: 0"),
    ({"broadcast_tcp_port": 65536}, "--broadcast-tcp-port and --broadcast-http-port must be [0,65535]"),
    ({"lookupd_tls_cert": "c"}, "--lookupd-tls-cert and --lookupd-tls-key must be given together"),
    ({"lookupd_tls_root_ca_file": "c"}, "--lookupd-tls-cert and --lookupd-tls-root-ca-file need --lookupd-tls"),
    ({"durability": "paper"}, "--durability must be one of memory, os, fsync"),
    ({"mem_queue_size": -1}, "--mem-queue-size must be at least 0"),
    ({"max_req_timeout": 1194 * HOUR}, "--max-req-timeout must be at most 1193h2m47.295s"),
    ({"queue_scan_interval": 0}, "--queue-scan-interval must be at least 1ns"),
    ({"queue_scan_dirty_percent": -0.1}, "--queue-scan-dirty-percent must be at least 0"),
]


@pytest.mark.parametrize(("overrides", "text"), INVALID)
def test_values_out_of_range_are_refused_in_nsq_s_words(overrides, text):
    with pytest.raises(OptionError) as error:
        NsqdOptions(**overrides).validate()
    assert str(error.value) == text


def test_parse_validates():
    with pytest.raises(OptionError, match="--node-id"):
        nsqd("--node-id=5000")


def test_defaults_are_valid():
    NsqdOptions().validate()


@pytest.mark.parametrize(("given", "kept"), [("false", "true"), ("tcp-https", "tcp-https"), ("true", "true")])
def test_a_client_auth_policy_requires_tls(given, kept):
    assert NsqdOptions(tls_client_auth_policy="require", tls_required=given).tls_required == kept


# --- The table


def test_options_are_made_by_hand_with_overrides_and_cannot_change():
    options = NsqdOptions(data_path="/x", tcp_address="127.0.0.1:0", nsqlookupd_tcp_addresses=["a:1"])
    assert (options.data_path, options.tcp_address) == ("/x", "127.0.0.1:0")
    assert options.nsqlookupd_tcp_addresses == ("a:1",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.data_path = "/y"  # type: ignore[misc]


@pytest.mark.parametrize(("hostname", "node_id"), [("vm", 617), ("localhost", 16), ("host.example.com", 125)])
def test_the_default_node_id_is_the_go_daemon_s(hostname, node_id):
    assert default_node_id(hostname) == node_id


# The flags of nsqd 1.3, and two that came after it. A flag that is lost breaks someone's start script.
NSQ_FLAGS = """
    auth-http-address auth-http-request-method broadcast-address broadcast-http-port broadcast-tcp-port config data-path
    deflate e2e-processing-latency-percentile e2e-processing-latency-window-time enable-experiment http-address
    http-client-connect-timeout http-client-request-timeout https-address log-level log-prefix lookupd-tcp-address
    max-body-size max-bytes-per-file max-channel-consumers max-deflate-level max-heartbeat-interval max-msg-size
    max-msg-timeout max-output-buffer-size max-output-buffer-timeout max-rdy-count max-req-timeout mem-queue-size
    min-output-buffer-timeout msg-timeout node-id output-buffer-timeout queue-scan-selection-count
    queue-scan-worker-pool-max snappy statsd-address statsd-exclude-ephemeral statsd-interval statsd-mem-stats
    statsd-prefix statsd-udp-packet-size sync-every sync-timeout tcp-address tls-cert tls-client-auth-policy tls-key
    tls-min-version tls-required tls-root-ca-file topology-region topology-zone verbose version worker-id
""".split()


def test_every_flag_of_nsq_is_there():
    assert set(NSQ_FLAGS) <= set(option_table(NsqdOptions))


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("node-id", "id"),
        ("lookupd-tcp-address", "nsqlookupd_tcp_addresses"),
        ("auth-http-address", "auth_http_addresses"),
        ("e2e-processing-latency-percentile", "e2e_processing_latency_percentiles"),
        ("enable-experiment", "enable_experiment"),
    ],
)
def test_renamed_keys_are_nsq_s(flag, key):
    assert option_table(NsqdOptions)[flag].key == key


def test_every_default_has_the_type_its_flag_gives():
    for entry in option_table(NsqdOptions).values():
        if entry.kind.repeatable:
            assert entry.default == (), entry.flag
        else:
            assert entry.kind.from_text(entry.kind.to_text(entry.default)) == entry.default, entry.flag


def test_help_has_every_flag_with_its_default():
    text = help_text(NsqdOptions)
    # Of --tls-required, one of three words; switches that are off say nothing.
    assert text.count("(default false)") == 1
    assert text.startswith("Usage of nsqd:\n")
    for flag, entry in option_table(NsqdOptions).items():
        assert re.search(rf"^  -{flag}( |$)", text, re.MULTILINE), flag
        assert entry.help in text, flag
    assert '(default "0.0.0.0:4150")' in text
    assert "(default 1m0s)" in text


@pytest.mark.parametrize(
    ("options", "page"),
    [(NsqdOptions, "options.md"), (NsqlookupdOptions, "nsqlookupd.md"), (NsqadminOptions, "nsqadmin.md")],
    ids=lambda value: getattr(value, "program", value),
)
def test_every_option_is_in_the_docs_with_its_key_default_and_meaning(options, page):
    rows = {}
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if found := re.match(r"\| `--([a-z0-9-]+)`", line):
            rows[found[1]] = [cell.strip() for cell in line.strip("|").split(" | ")]
    table = option_table(options)
    assert set(rows) == set(table)
    for flag, entry in table.items():
        assert rows[flag][-1] == entry.help
        if entry.key is not None:
            assert rows[flag][1] == f"`{entry.key}`"
            of_this_host = entry.key in ("id", "broadcast_address")
            default = entry.kind.to_text(entry.default)
            if default and not of_this_host:
                assert rows[flag][2] == f"`{default}`"


# --- nsqlookupd


def test_every_flag_of_nsq_s_nsqlookupd_is_there_with_its_default():
    table = option_table(NsqlookupdOptions)
    defaults = {flag: entry.kind.to_text(entry.default) for flag, entry in table.items() if entry.key is not None}
    assert (
        defaults.items()
        >= {
            "log-level": "info",
            "log-prefix": "[nsqlookupd] ",
            "tcp-address": "0.0.0.0:4160",
            "http-address": "0.0.0.0:4161",
            "inactive-producer-timeout": "5m0s",
            "tombstone-lifetime": "45s",
        }.items()
    )
    assert {"broadcast-address", "config", "verbose", "version"} <= set(table)


def test_the_example_file_of_nsqlookupd_shows_known_keys_and_true_defaults(tmp_path):
    text = re.sub(r"^# (?=\w+ = )", "", EXAMPLE_OF_NSQLOOKUPD.read_text(), flags=re.MULTILINE)
    assert set(tomllib.loads(text)) <= {entry.key for entry in option_table(NsqlookupdOptions).values()}
    path = tmp_path / "nsqlookupd.cfg"
    path.write_text(text)
    options, defaults = parse(NsqlookupdOptions, [f"--config={path}"]), NsqlookupdOptions()
    changed = {key for key in vars(defaults) if getattr(options, key) != getattr(defaults, key)}
    loopback = {"tcp_address", "http_address"}
    examples = {"broadcast_address", "http_auth_token_file", "tls_cert", "tls_key", "tls_root_ca_file"}
    assert changed == examples | loopback
    marked = re.findall(r"^# (\w+) = .*  # example$", EXAMPLE_OF_NSQLOOKUPD.read_text(), re.MULTILINE)
    assert set(marked) == examples


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"tls_cert": "c"}, "failed to build TLS config - --tls-cert and --tls-key must be given together"),
        ({"tls_root_ca_file": "c"}, "cannot ask for client certificates without TLS key and cert"),
        ({"tombstone_lifetime": -1}, "--tombstone-lifetime must be at least 0s"),
    ],
)
def test_values_of_nsqlookupd_that_do_not_fit_are_refused(overrides, text):
    with pytest.raises(OptionError) as error:
        NsqlookupdOptions(**overrides).validate()
    assert str(error.value) == text
