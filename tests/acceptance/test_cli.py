"""Every command's manners: exit codes, streams, messages that say what is wrong, where, and what to do."""

from __future__ import annotations

import codecs
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from sqlalchemy import Engine

from chorus_batch.jobs import queue
from chorus_batch.jobs.cli import COMMANDS
from chorus_batch.jobs.cli import cli as group
from chorus_batch.jobs.database import HEAD, connect, transaction
from tests.integration.conftest import Writer

from .conftest import CATALOG, SCRIPT, Cli, run_script

PROMPTS = "id,prompt\na,a red circle\nb,a blue circle\nc,a green ring\n"


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by its full name, groups included."""
    yield name.strip(), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            assert found is not None
            yield from leaves(found, f"{name} {sub}")


ALL = dict(leaves(group))


# Help


@pytest.mark.parametrize("name", ALL)
def test_every_command_explains_itself(cli: Cli, name: str) -> None:
    command = ALL[name]
    ended = cli(*name.split(), "--help")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"Usage: chorus-batch {name}".strip())
    assert command.help and command.help.strip()[-1] in ".:"
    options = [option for option in command.params if isinstance(option, click.Option)]
    unexplained = [option.name for option in options if not option.help and not isinstance(option.type, click.Choice)]
    assert unexplained in ([], ["seed_policy"])


def test_all_commands_are_there() -> None:
    assert set(ALL) >= {
        "submit", "list", "status", "wait", "jobs", "show", "results", "stats", "sql", "cache ls", "cache stats", "up", "down",
        "ps", "db upgrade", "db current", "db check", "doctor", "worker start", "worker list", "pause", "resume", "cancel", "retry",
    }  # fmt: skip
    assert all(line.endswith(".") for _, line in COMMANDS.values())


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from chorus_batch.jobs.cli import main\n"
        "try: main(['submit', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'sqlalchemy', 'numpy', 'psycopg', 'celery', 'minio', 'rich', 'alembic', 'av', 'PIL'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert "--seed-policy" in done.stdout and done.stderr.strip() == "set()"


def test_the_version(cli: Cli) -> None:
    assert cli("--version").out.startswith("chorus-batch, version 0.")


# 2: usage


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bogus",), "No such command 'bogus'"),
        (("submit",), "Missing argument 'FILE...'"),
        (("submit", "x.csv", "--bogus"), "No such option"),
        (("submit", "x.csv", "--cache", "maybe"), "'maybe' is not one of"),
        (("submit", "x.csv", "--set", "steps"), "--set 'steps': must be key=value"),
        (("submit", "x.csv", "--set", "steps=0"), "--set steps"),
        (("submit", "x.csv", "--set", "colour=red"), "no parameter 'colour'"),
        (("submit", "x.csv", "--label", "x"), "--label 'x': must be key=value"),
        (("submit", "x.csv", "--format", "xlsx"), "format is 'xlsx'"),
        (("submit", "x.csv", "--seed-policy", "lucky"), "seed policy"),
        (("submit", "x.csv", "--repeat", "0"), "repeat is 0"),
        (("submit", "x.csv", "--priority", "many"), "not a valid integer"),
        (("jobs", "1", "--state", "bogus"), "'bogus' is not one of"),
        (("list", "--limit", "-1"), "--limit"),
        (("cache", "ls", "--limit", "0"), "--limit"),
        (("wait", "1", "--timeout", "soon"), "--timeout"),
        (("results", "1"), "Missing option '-o'"),
        (("results", "1", "-o", "x", "--what", "gif"), "--what gif"),
        (("sql",), "Missing argument 'QUERY'"),
        (("cache",), "Usage: chorus-batch cache"),
        ((), "Usage: chorus-batch"),
    ],
)
def test_usage_errors(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    """None of them starts a server."""
    ended = cli("--data-dir", tmp_path / "data", *arguments) if arguments else cli()
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("THREADS", "many", "CHORUS_THREADS is 'many'"),
        ("PROFILE", "cloud", "profile is 'cloud'"),
        ("MODEL", "sora", "no model named 'sora'"),
        ("CONFIG", "/nowhere/config.toml", "/nowhere/config.toml: No such file"),
        ("DATABASE_URL", "not a url", "CHORUS_DATABASE_URL"),
        ("DATABASE_URL", "mysql://a:secret@b/c", "CHORUS_DATABASE_URL"),
        ("DATABASE_URL", "", "CHORUS_DATABASE_URL"),
        ("BROKER_URL", "", "CHORUS_BROKER_URL"),
        ("BROKER_URL", "carrier-pigeon://u:secret@roof", "CHORUS_BROKER_URL"),
        ("S3_ENDPOINT", "", "CHORUS_S3_ENDPOINT"),
    ],
)
def test_a_wrong_setting_is_named(
    production: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(f"CHORUS_{name}", value)
    (tmp_path / "p.csv").write_text(PROMPTS)
    ended = production("submit", tmp_path / "p.csv")
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err and "secret" not in ended.err


def test_an_unusable_embedder_is_named(production: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORUS_EMBEDDER", "word2vec")
    (tmp_path / "p.csv").write_text(PROMPTS)
    ended = production("submit", tmp_path / "p.csv")
    assert ended.code == 2 and "embedder is 'word2vec'" in ended.err and "minilm" in ended.err


@pytest.mark.parametrize("command", [("list",), ("up",), ("submit", str(CATALOG))])
def test_a_data_folder_that_cannot_be_made(cli: Cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("")
    ended = cli("--data-dir", tmp_path / "file" / "data", *command)
    assert (ended.code, ended.out) == (2, "")
    assert str(tmp_path / "file") in ended.err and "--data-dir" in ended.err


def test_a_data_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Root may write anywhere but in /proc."""
    ended = run_script("--data-dir", "/proc/chorus", "list")
    assert (ended.code, ended.out) == (2, "")
    assert "/proc/chorus" in ended.err and "Traceback" not in ended.err


# 3: files that aren't accepted

NUL, LATIN = b"prompt\na\x00b\n", "prompt\ncaf\u00e9\n".encode("latin-1")
BAD: dict[str, tuple[str, bytes, str, str]] = {
    # name: (file name, content, code, where)
    "F1 Latin-1": ("p.csv", LATIN, "encoding", "line 2"),
    "F1 UTF-16 without a mark": ("p.csv", "prompt\na cat\n".encode("utf-16-le"), "encoding", "p.csv"),
    "F1 a character cut off": ("p.csv", "prompt\ncaf\u00e9".encode()[:-1], "encoding", "line 2"),
    "F2 NUL": ("p.csv", NUL, "nul", "line 2, row 1, column prompt"),
    "F2 NUL in JSON": ("p.jsonl", rb'{"prompt": "a\u0000b"}', "nul", "line 1, row 1, column prompt"),
    "F2 half a pair": ("p.jsonl", rb'{"prompt": "\ud83d"}', "surrogate", "line 1, row 1, column prompt"),
    "F3 an open quote": ("p.csv", b'prompt,seed\na,1\n"b,2\nc,3\n', "quote_unclosed", "line 3"),
    "F3 an open quote swallowing much": ("p.csv", b'prompt\n"b\n' + b"cat\n" * 50_000, "quote_unclosed", "line 2"),
    "F3 text behind a quote": ("p.csv", b'prompt,seed\n"a" b,1\n', "quote_misplaced", "line 2"),
    "F3 a very long field": ("p.csv", b"prompt\n" + b"x" * 70_000 + b"\n", "field_too_long", "line 2, row 1"),
    "F4 lines in quotes": ("p.csv", b'prompt,steps\n"a\nb",4\n"c\nd",x\n', "not_a_number", "line 4, row 2, column steps"),
    "F5 semicolons": ("p.csv", b"prompt;steps\r\na, b;4\r\nc;x\r\n", "not_a_number", "line 3, row 2, column steps"),
    "F6 equal ids": ("p.csv", b"id,prompt\nx,a\nx,b\n", "duplicate_id", "line 3, row 2, column id"),
    "F7 an empty prompt": ("p.csv", b"prompt,seed\na,1\n ,2\n", "empty_prompt", "line 3, row 2, column prompt"),
    "F7 an invisible prompt": ("p.csv", "prompt\n\u200b\n".encode(), "empty_prompt", "line 2, row 1"),
    "too few fields": ("p.csv", b"prompt,seed\na\n", "too_few_fields", "line 2, row 1"),
    "too many fields": ("p.csv", b"prompt,seed\na,1,2\n", "too_many_fields", "line 2, row 1"),
    "no prompt column": ("p.csv", b"name,seed\na,1\n", "missing_prompt", "p.csv"),
    "two prompt columns": ("p.csv", b"prompt,Prompt\na,b\n", "duplicate_column", "p.csv"),
    "nothing": ("p.csv", b"", "empty_file", "p.csv"),
    "a header alone": ("p.csv", b"prompt,seed\n", "no_rows", "p.csv"),
    "a spreadsheet": ("p.csv", b"PK\x03\x04" + bytes(100), "binary_file", "p.csv"),
    "not JSON": ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "json", "line 2, row 2"),
    "a JSON list": ("p.jsonl", b'["a"]\n', "json", "line 1, row 1"),
    "equal JSON keys": ("p.jsonl", b'{"prompt": "a", "prompt": "b"}\n', "duplicate_key", "line 1"),
    "a JSON value of a wrong type": ("p.jsonl", b'{"prompt": ["a"]}\n', "value_type", "column prompt"),
    "an unknown flag": ("p.txt", b"a cat --bogus 3\n", "unknown_flag", "line 1"),
    "a wrong OpenAI request": (
        "p.jsonl", b'{"custom_id": "a", "method": "POST", "url": "/v1/chat", "body": {"prompt": "a"}}\n', "openai_request", "line 1",
    ),
    "a size": ("p.csv", b"prompt,size\na,832x480\n", "unsupported_size", "column size"),
    "a length": ("p.csv", b"prompt,frames\na,81\n", "unsupported_frames", "column frames"),
    "a sampler": ("p.csv", b"prompt,sampler\na,unipc\n", "unsupported_scheduler", "column sampler"),
    "a LoRA": ("p.csv", b"prompt,lora\na,x.safetensors\n", "unsupported_lora", "column lora"),
    "too long a prompt": ("p.csv", b"prompt\n" + b"cat " * 40 + b"\n", "prompt_too_long", "line 2, row 1"),
    "a seed": ("p.csv", b"prompt,seed\na,-5\n", "out_of_range", "column seed"),
    "a folder as a name": ("p.csv", b"prompt,output_name\na,..\n", "bad_name", "column output_name"),
    "a contradiction": ("p.csv", b"prompt,size,width,height\na,64x64,64,32\n", "conflict", "line 2, row 1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_and_the_place_is_named(production: Cli, tmp_path: Path, kind: str) -> None:
    name, content, code, where = BAD[kind]
    path = tmp_path / name
    path.write_bytes(content)
    ended = production("submit", path, "--dry-run")
    assert (ended.code, ended.out) == (3, "")
    assert str(path) in ended.err and where in ended.err and f"[{code}]" in ended.err


@pytest.mark.parametrize("name", ["missing.csv", "."])
def test_a_file_that_cannot_be_read(production: Cli, tmp_path: Path, name: str) -> None:
    ended = production("submit", tmp_path / name)
    assert ended.code == 3 and "[unreadable]" in ended.err and str(tmp_path) in ended.err


def test_many_errors_are_counted(production: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompt,steps\n" + "a,x\n" * 100)
    ended = production("submit", tmp_path / "p.csv")
    assert ended.code == 3 and ended.err.count("[not_a_number]") == 20
    assert (
        "100 errors; nothing was stored" in ended.err and "and 80 more" in ended.err and "--on-invalid row" in ended.err
    )
    assert production("list").out == ""


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("bom.csv", codecs.BOM_UTF8 + b"Prompt,Seed\r\na red circle,1\r\n", 1),
        ("utf16.csv", codecs.BOM_UTF16_LE + "prompt\tseed\na red circle\t1\n".encode("utf-16-le"), 1),
        ("semicolon.csv", b"sep=;\nprompt;cfg\na red circle;2,5\na blue circle;3\n", 2),
        ("lines.csv", b'prompt,mood\n"a red\ncircle","x,y"\n', 1),
        ("formula.csv", b"prompt,note\na red circle,=1+1\n", 1),
        ("p.tsv", b"prompt\tseed\na red circle\t1\n", 1),
        ("p.txt", b"# a comment\na red circle --s 4 --d 7\n\na blue circle\n", 2),
        ("p.jsonl", b'{"prompt": "a red circle", "mood": {"x": [1]}}\n', 1),
        (
            "o.jsonl",
            b'{"custom_id": "a", "method": "POST", "url": "/v1/videos", "body": {"prompt": "a red circle"}}\n',
            1,
        ),
        ("repeat.csv", b"prompt,repeat\na red circle,3\n", 3),
    ],
)
def test_files_that_people_have(production: Cli, tmp_path: Path, name: str, content: bytes, rows: int) -> None:
    (tmp_path / name).write_bytes(content)
    ended = production("submit", tmp_path / name, "--cache", "exact", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["forecast"]["rows"] == rows
    stored = production("jobs", str(ended.json["batch_id"]), "--json").objects
    assert len(stored) == rows and "red" in stored[0]["prompt"]


def test_standard_input(production: Cli) -> None:
    ended = production("submit", "-", "--cache", "off", "--name", "piped", stdin=b"prompt\na red circle\n")
    assert ended.code == 0 and "(piped): 1 jobs" in ended.out
    refused = production("submit", "-", stdin=b"prompt,steps\na,x\n")
    assert refused.code == 3 and "-, line 2, row 1, column steps" in refused.err


def test_what_was_changed_and_left_out_is_told(production: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompt,frames,mood\na red circle,10,calm\na blue circle,x,\n")
    ended = production("submit", tmp_path / "p.csv", "--cache", "off", "--on-invalid", "row", "-q")
    assert ended.code == 0 and ended.lines == ["1"]
    assert "note: " in ended.err and "10 frames are made as 9" in ended.err and "'mood'" in ended.err
    assert "left out: " in ended.err and "line 3, row 2, column frames" in ended.err
    assert production("jobs", "1", "--json").json["extra"] == {"mood": "calm"}


def test_a_dry_run(production: Cli) -> None:
    ended = production("submit", CATALOG, "--dry-run")
    assert ended.code == 0 and "nothing was stored" in ended.out and "24 videos" in ended.err
    assert production("list", "-q").out == ""
    planned = production("submit", CATALOG, "--dry-run", "--json").json
    assert planned["batch_id"] is None and planned["forecast"]["hit_rate"] > 0.3 and planned["schema_version"] == 1


# 4, 5


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("wait",),
        ("jobs",),
        ("pause",),
        ("resume",),
        ("cancel", "--yes"),
        ("retry",),
        ("stats",),
        ("results", "-o", "x"),
    ],
)
def test_an_unknown_batch(production: Cli, command: tuple[str, ...]) -> None:
    ended = production(command[0], "nothing", *command[1:])
    assert (ended.code, ended.out) == (4, "")
    assert "there is no batch 'nothing'" in ended.err and "chorus-batch list" in ended.err


@pytest.mark.parametrize("name", ["7", "nothing/x", "x", ""])
def test_an_unknown_job(production: Cli, name: str) -> None:
    ended = production("show", name)
    assert ended.code == 4 and "there is no" in ended.err


def test_conflicts(production: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(PROMPTS)
    first = production("submit", tmp_path / "p.csv", "--cache", "off", "--name", "nightly", "--label", "team=x")
    assert (first.code, first.lines) == (0, ["batch 1 (nightly): 3 jobs"])
    again = production("submit", tmp_path / "p.csv", "--cache", "off")
    assert (again.code, again.out) == (5, "")
    assert "as batch 1 (nightly)" in again.err and "--new" in again.err
    taken = production("submit", tmp_path / "p.csv", "--cache", "off", "--new", "--name", "nightly")
    assert taken.code == 5 and "'nightly'" in taken.err
    assert production("submit", tmp_path / "p.csv", "--cache", "off", "--new", "-q").lines == ["2"]


# 6: servers that are away


def test_a_database_that_is_away(production: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHORUS_DATABASE_URL", "postgresql://u:secret@127.0.0.1:1/x")
    (tmp_path / "p.csv").write_text(PROMPTS)
    for command in (("list",), ("db", "check"), ("submit", tmp_path / "p.csv")):
        ended = production(*command)
        assert (ended.code, ended.out) == (6, "")
        assert (
            "database" in ended.err and "127.0.0.1" in ended.err and "secret" not in ended.err and "doctor" in ended.err
        )


def test_a_store_that_is_away(
    production: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, migrated_url: str
) -> None:
    """`results` asks it first for what is there to fetch, so something has to be finished."""
    _finished(migrated_url)
    monkeypatch.setenv("CHORUS_S3_ENDPOINT", "127.0.0.1:1")
    ended = production("results", "batch", "-o", tmp_path / "out")
    assert (ended.code, ended.out) == (6, "")
    assert "127.0.0.1:1" in ended.err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_stores_address_that_is_none(
    production: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, migrated_url: str
) -> None:
    _finished(migrated_url)
    monkeypatch.setenv("CHORUS_S3_ENDPOINT", "http://127.0.0.1:1/path")
    ended = production("results", "batch", "-o", tmp_path / "out")
    assert (ended.code, ended.out) == (2, "")
    assert "s3_endpoint is 'http://127.0.0.1:1/path'" in ended.err and "host:port" in ended.err


def test_a_broker_that_is_away_stops_nothing(production: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers look for work by themselves."""
    for n, url in enumerate(("redis://127.0.0.1:1/0", "amqp://127.0.0.1:1")):
        monkeypatch.setenv("CHORUS_BROKER_URL", url)
        (tmp_path / "p.csv").write_text(f"prompt,n\na red circle,{n}\n")
        ended = production("submit", tmp_path / "p.csv", "--cache", "off", "-q")
        assert (ended.code, ended.lines) == (0, [str(n + 1)])


def test_the_doctor_of_production(production: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHORUS_PROFILE")
    ended = production("doctor", "--profile", "production", "--json")
    findings = {found["name"]: found for found in ended.objects}
    assert ended.code == 0 and {name for name, found in findings.items() if found["ok"] is False} == set()
    assert findings["servers"]["detail"].startswith("profile production")
    assert {"database", "broker", "store", "embedder", "model", "memory"} <= set(findings)
    monkeypatch.delenv("CHORUS_DATABASE_URL")
    ended = production("doctor", "--profile", "production", "--json")
    (wrong,) = [found for found in ended.objects if found["ok"] is False]
    assert ended.code == 6 and "CHORUS_DATABASE_URL" in wrong["detail"] + wrong["hint"]


def test_the_doctor_names_what_is_away(production: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORUS_DATABASE_URL", "postgresql://u:secret@127.0.0.1:1/x")
    monkeypatch.setenv("CHORUS_BROKER_URL", "redis://127.0.0.1:1/0")
    ended = production("doctor", "--json")
    failed = {found["name"] for found in ended.objects if found["ok"] is False}
    assert ended.code == 6 and failed == {"database", "broker"} and "secret" not in ended.out
    text = production("doctor", "-q")
    assert text.code == 6 and [line.split()[:2] for line in text.lines if line.startswith("FAIL")] == [
        ["FAIL", "database"],
        ["FAIL", "broker"],
    ]


def test_a_schema_that_is_old(production: Cli, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORUS_DATABASE_URL", database_url)
    assert production("db", "current").lines == [f"empty (needed: {HEAD})"]
    check = production("db", "check")
    assert check.code == 6 and HEAD in check.err and "db upgrade" in check.err
    assert production("db", "upgrade").lines == [HEAD]
    assert production("db", "current").lines == [f"{HEAD} (needed: {HEAD})"]
    assert production("db", "check").lines == ["ok"]


def test_production_has_no_servers_of_ours(production: Cli) -> None:
    assert production("ps", "--json").out == ""
    assert production("down").code == 0
    assert production("list").code == 0  # the person's own go on


# What a person does to a batch


@pytest.fixture
def batch(production: Cli, tmp_path: Path) -> str:
    (tmp_path / "p.csv").write_text(PROMPTS)
    return production("submit", tmp_path / "p.csv", "--cache", "off", "-q").lines[0]


@pytest.fixture
def writer(migrated_url: str) -> Iterator[Writer]:
    engine = connect(migrated_url)
    yield Writer(engine)
    engine.dispose()


def fail_one(engine: Engine, writer: Writer) -> None:
    with transaction(engine) as connection:
        taken = queue.claim(connection, writer.worker("w"))
        assert taken is not None
        queue.fail(connection, taken, "out_of_memory", "no room", retry=False, max_failures=3)


def _finished(url: str) -> None:
    from chorus_batch.jobs.storage import StoredObject
    from tests.integration.conftest import Part, made

    engine = connect(url)
    writer = Writer(engine)
    writer.batch([Part()])
    with transaction(engine) as connection:
        taken = queue.claim(connection, writer.worker("w"))
        assert taken is not None
        video = StoredObject("batches/x/video.mp4", 10, "0" * 64)
        queue.finish(connection, taken, made(taken, video=video, latents=video))
    engine.dispose()


def states(production: Cli, batch: str) -> list[str]:
    return [row["state"] for row in production("jobs", batch, "--json").objects]


def test_pausing_and_going_on(production: Cli, batch: str) -> None:
    assert production("pause", batch).lines == ["3"]
    assert states(production, batch) == ["paused"] * 3
    assert "  paused  0/3 done" in production("status", batch).out
    assert production("resume", batch).lines == ["3"]
    assert states(production, batch) == ["ready"] * 3


def test_cancelling(production: Cli, batch: str) -> None:
    refused = production("cancel", batch, stdin=b"n\n")
    assert (refused.code, refused.out) == (130, "") and "Give up the unfinished jobs" in refused.err
    assert states(production, batch) == ["ready"] * 3
    assert production("cancel", batch, "--yes").lines == ["3"]
    assert states(production, batch) == ["cancelled"] * 3
    assert production("wait", batch).code == 7
    for command in ("pause", "resume", "retry"):
        ended = production(command, batch)
        assert ended.code == 5 and "was cancelled" in ended.err


def test_cancelling_after_a_question(production: Cli, batch: str) -> None:
    assert production("cancel", batch, stdin=b"y\n").lines[-1].endswith("3")
    assert states(production, batch) == ["cancelled"] * 3


def test_trying_again(production: Cli, batch: str, writer: Writer) -> None:
    fail_one(writer.engine, writer)
    (failed,) = production("jobs", batch, "--state", "failed", "--json").objects
    assert (failed["error_code"], failed["error_message"]) == ("out_of_memory", "no room")
    shown = production("show", f"{batch}/{failed['id']}").out
    assert "error       out_of_memory: no room" in shown and "attempt 1   failed" in shown
    assert production("retry", batch, "--code", "video").lines == ["0"]
    assert production("retry", batch).lines == ["1"]
    assert states(production, batch) == ["ready"] * 3


def test_waiting(production: Cli, batch: str, writer: Writer) -> None:
    ended = production("wait", batch, "--timeout", "0.1")
    assert (ended.code, ended.out) == (124, "")
    assert "not over after 0.1 s" in ended.err and "0/3 done" in ended.err
    for _ in range(3):
        with transaction(writer.engine) as connection:
            taken = queue.claim(connection, writer.worker(f"w{_}"))
            assert taken is not None
            queue.fail(connection, taken, "video", "broken", retry=False, max_failures=3)
    over = production("wait", batch, "--json")
    assert (over.code, over.json["failed"]) == (1, 3)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_wait_that_is_interrupted(production: Cli, batch: str, number: signal.Signals, code: int) -> None:
    """Ctrl-C leaves the batch alone and no traceback behind."""
    process = subprocess.Popen(
        [SCRIPT, "wait", batch],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    first = process.stderr.readline()  # the first line comes with the first look
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert "0/3 done" in first and (process.returncode, out) == (code, "") and "Traceback" not in err
    assert states(production, batch) == ["ready"] * 3


def test_counts_sum_to_the_total(production: Cli, batch: str, writer: Writer) -> None:
    fail_one(writer.engine, writer)
    for found in (production("status", batch, "--json").json, *production("list", "--json").objects):
        counts: list[int] = [found[n] for n in ("queued", "running", "done", "failed", "quarantined", "cancelled")]
        assert sum(counts) == found["total"] == 3


def test_workers_are_listed(production: Cli, writer: Writer) -> None:
    writer.worker("one")
    writer.worker("silent")
    writer.silence("silent", 1000)
    (found,) = production("worker", "list", "--json").objects
    assert (found["id"], found["host"], found["schema_version"]) == ("one", "host", 1)
    assert production("worker", "list", "-q").lines == ["one"]
    assert production("worker", "list").lines[0].split()[0] == "WORKER"


def test_brackets_in_names_and_prompts(production: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("id,prompt\n[/x],a [red] circle [/b] :smile:\n")
    assert production("submit", tmp_path / "p.csv", "--cache", "off", "--name", "[/b] x").code == 0
    assert "[/x]" in production("jobs", "1").out and "a [red] circle [/b] :smile:" in production("jobs", "1").out
    assert "[/b] x" in production("list").out


def test_an_empty_installation(production: Cli) -> None:
    assert production("list").out == production("list", "--json").out == ""
    assert production("stats", "--json").json["hit_rate"] is None
    assert production("stats", "-q").lines == ["0.0000"]
    assert production("cache", "ls").lines[0].split() == [
        "ENTRY",
        "HITS",
        "STEPS",
        "SKIPPED",
        "BYTES",
        "MODEL",
        "PROMPT",
    ]
    assert production("cache", "stats", "--json").json["entries"] == 0
    for view in ("cache_hits_by_batch", "cache_hits_by_day", "hit_rate_per_100", "savings_by_entry"):
        assert production("sql", f"select * from {view}", "--format", "json").out == ""


def test_sql_that_fails(production: Cli) -> None:
    ended = production("sql", "select hitz from hit_rate_per_100")
    assert (ended.code, ended.out) == (2, "")
    assert 'column "hitz" does not exist (at character 8)' in ended.err
    for query in (
        "drop table jobs",
        "delete from jobs returning id",
        "select 1; select 2",
        "copy jobs to program 'cat'",
    ):
        assert production("sql", query).code == 2


def test_sql_as_csv_is_safe_for_spreadsheets(production: Cli) -> None:
    ended = production("sql", "select '=cmd()' as \"@x\", -1 as n, null as o, 'a,\"b' as p", "--format", "csv")
    assert ended.lines == ["'@x,n,o,p", '\'=cmd(),-1,,"a,""b"']


def test_sql_as_csv_writes_json_as_json(production: Cli) -> None:
    ended = production(
        "sql", "select '{\"a\": [1, null]}'::jsonb as x, '\\x01ff'::bytea as y, true as z", "--format", "csv"
    )
    import csv

    (row,) = csv.DictReader(ended.lines)
    value: Any = json.loads(row["x"])
    assert (value, row["y"], row["z"]) == ({"a": [1, None]}, "01ff", "true")
    table = production("sql", "select '{\"a\": [1, null]}'::jsonb as x, '\\x01ff'::bytea as y")
    assert table.lines[1].split("  ") == ['{"a": [1, null]}', "01ff"]


def test_mistakes_of_ours_are_owned_up_to(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("chorus_batch.jobs.cli.session.load_settings", broken)
    ended = cli("list")
    assert (ended.code, ended.out) == (10, "")
    assert "internal error: RuntimeError: a bug" in ended.err and "-v" in ended.err
    with pytest.raises(RuntimeError):
        cli("-v", "list")
