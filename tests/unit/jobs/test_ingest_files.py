"""Files as people have them: every format, and every trap that files of prompts are known for."""

import codecs
import csv
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.ingest.columns import ALIASES, ColumnNames
from chorus_batch.jobs.ingest.dialect import detect
from chorus_batch.jobs.ingest.lines import find_bad_byte
from chorus_batch.jobs.ingest.rejection import FILE_CODES
from chorus_batch.jobs.ingest.rows import FileRejected, IngestOptions, Row, RowError, Source, read_batch

BUILTIN = load_card("builtin")
WIDE = replace(BUILTIN, size_multiple=16, allowed_sizes=(), allowed_frames=(), max_prompt_tokens=1 << 20)


@pytest.fixture
def source(tmp_path):
    def source(content, name="p.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return Source(path, name)

    return source


@pytest.fixture
def read(source):
    def read(content, name="p.csv", **options):
        return list(read_batch(source(content, name), IngestOptions(WIDE, **options)))

    return read


@pytest.fixture
def rejected(source):
    """The error of a file that can't be read on."""

    def rejected(content, name="p.csv", **options):
        with pytest.raises(FileRejected) as caught:
            list(read_batch(source(content, name), IngestOptions(WIDE, **options)))
        (error,) = caught.value.errors
        assert error.code == caught.value.code and error.code in FILE_CODES and caught.value.exit_code == 3
        assert error.file == name
        return caught.value

    return rejected


def prompts(items):
    assert all(isinstance(item, Row) for item in items), items
    return [item.prompt for item in items]


# F1: encodings


@pytest.mark.parametrize(
    ("encoding", "mark"),
    [("utf-8", b""), ("utf-8", codecs.BOM_UTF8), ("utf-16-le", codecs.BOM_UTF16_LE), ("utf-16-be", codecs.BOM_UTF16_BE),
     ("utf-32-le", codecs.BOM_UTF32_LE)],
)  # fmt: skip
def test_marks_tell_the_encoding(read, encoding, mark):
    items = read(mark + "prompt,seed\r\ncafé 東京 \U0001f431,1\r\n".encode(encoding))
    assert prompts(items) == ["café 東京 \U0001f431"] and items[0].seed == 1


@pytest.mark.parametrize("encoding", ["cp1252", "shift_jis", "gb18030", "utf-16-le", "mac-roman"])
def test_other_encodings_are_named_by_the_person(read, encoding):
    text = {"shift_jis": "東京の猫", "gb18030": "北京的猫"}.get(encoding, "café")
    assert prompts(read(f"prompt\n{text}\n".encode(encoding), encoding=encoding)) == [text]


def test_the_first_wrong_byte_is_located(rejected):
    for newline in ("\n", "\r\n", "\r"):
        error = rejected(f"prompt{newline}a cat{newline}".encode() + b"caf\xe9\nb\n")
        offset = len(f"prompt{newline}a cat{newline}caf")
        assert error.code == "encoding" and error.errors[0].line == 3
        assert f"byte 0xE9 at offset {offset}" in str(error) and "UTF-8" in str(error) and "--encoding" in error.hint


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "shift_jis", "gb18030", "ascii"])
@pytest.mark.parametrize("size", [3, 70_000, 131_070])
def test_wrong_bytes_are_located_across_blocks(tmp_path, encoding, size):
    path = tmp_path / "f"
    good = ("x" * 9 + "\r\n") * (size // 11 + 1)
    before = good.encode(encoding)
    # Half a surrogate pair, or a byte that begins nothing.
    bad = b"\x00\xdc" if encoding == "utf-16" else b"\xff"
    path.write_bytes(before + bad + good.encode("ascii" if encoding != "utf-16" else "utf-16-le"))
    found = find_bad_byte(path, encoding)
    assert (found.offset, found.line) == (len(before), good.count("\n") + 1)
    path.write_bytes(before)
    assert find_bad_byte(path, encoding) is None


def test_a_wrong_byte_far_into_the_file(rejected):
    error = rejected(b"prompt\n" + b"a cat\n" * 50_000 + b"\x80\n")
    assert (error.code, error.errors[0].line) == ("encoding", 50_002)


def test_a_cut_character_at_the_end(rejected):
    assert rejected("prompt\ncaf\u00e9".encode()[:-1]).errors[0].line == 2


@pytest.mark.parametrize("encoding", ["klingon", "base64", "rot13"])
def test_unknown_encodings(rejected, encoding):
    assert encoding in str(rejected("prompt\na\n", encoding=encoding))


def test_an_encoding_that_contradicts_the_mark(rejected, read):
    assert rejected(codecs.BOM_UTF8 + b"prompt\na\n", encoding="cp1252").code == "encoding"
    assert prompts(read(codecs.BOM_UTF8 + b"prompt\na\n", encoding="UTF-8")) == ["a"]


def test_utf16_without_a_mark_is_said_to_be_that(rejected):
    error = rejected("prompt\na cat\n".encode("utf-16-be"))
    assert error.code == "encoding" and "utf-16-be" in error.hint


@pytest.mark.parametrize(
    "start",
    [b"PK\x03\x04rest", b"\x1f\x8b\x08rest", b"\xd0\xcf\x11\xe0\xa1", b"PAR1....", bytes(200), bytes(range(1, 9)) * 40],
)
def test_binary_files(rejected, start):
    error = rejected(start)
    assert error.code == "binary_file" and error.hint


# F2: characters that no database text holds


def test_nul_in_a_cell_names_row_line_and_column(read):
    good, bad, after = read('prompt,seed,mood\na,1,x\n"b\nb",2,y\0z\nc,3,\n')
    assert isinstance(good, Row) and isinstance(after, Row)
    assert (bad.row, bad.line, bad.column, bad.code) == (2, 3, "mood", "nul")
    assert [item.code for item in read("a\0cat\n", "p.txt")] == ["nul"]


@pytest.mark.parametrize(
    ("record", "code", "column"),
    [
        (r'{"prompt": "a\u0000b"}', "nul", "prompt"),
        (r'{"prompt": "a", "x": {"deep": ["\u0000"]}}', "nul", "x"),
        (r'{"prompt": "a", "x\u0000": 1}', "nul", ""),
        (r'{"prompt": "\ud83d cat"}', "surrogate", "prompt"),
        ('{"prompt": "a\0b"}', "nul", ""),
    ],
)
def test_nul_and_half_pairs_in_json(read, record, code, column):
    (error,) = read(record + "\n", "p.jsonl")
    assert (error.code, error.column, error.line) == (code, column, 1)


def test_a_whole_pair_in_json_is_a_character(read):
    assert prompts(read(r'{"prompt": "\ud83d\udc31"}', "p.jsonl")) == ["\U0001f431"]


# F3, F4: quotes and lines


def test_an_unclosed_quote_names_its_line(rejected):
    error = rejected('prompt,seed\na,1\n"b\nb",2\n"c,3\nd,4\n')
    assert (error.code, error.errors[0].line, error.errors[0].row) == ("quote_unclosed", 5, 3)
    assert "line 5" in str(error) and '""' in error.hint


def test_an_unclosed_quote_in_a_large_file_gives_up_early(rejected):
    error = rejected('prompt,seed\nok,1\n"bad,2\n' + "a cat runs,3\n" * 100_000)
    assert (error.code, error.errors[0].line) == ("quote_unclosed", 3)


def test_an_unclosed_quote_after_a_field_of_several_lines(rejected):
    assert rejected('prompt,mood\n"one\ntwo\nthree","four\nfive\n').errors[0].line == 4


def test_text_after_a_closing_quote(rejected):
    error = rejected('prompt,seed\na,1\n"b" c,2\n')
    assert (error.code, error.errors[0].line) == ("quote_misplaced", 3)
    # An opening quote swallows rows until a later row's quote: the first one is to blame.
    assert rejected('prompt,seed\n"a,1\nb,2\n"c",3\n').errors[0].line == 2


def test_quotes_inside_a_field_are_text(read):
    assert prompts(read('prompt,seed\n5" screen,1\na "big" cat,2\n"say ""hi""",3\n')) == [
        '5" screen',
        'a "big" cat',
        'say "hi"',
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_row_and_line_are_both_told(read, newline):
    text = newline.join(["prompt,steps", '"one', 'two",5', "", "three,0", '"four', "", 'five",0', ""])
    first, second, third = read(text.encode())
    assert first.prompt == f"one{newline}two" and first.cleaned_prompt == "one two"
    assert (first.row, first.line) == (1, 2)
    assert (second.row, second.line, second.code) == (2, 5, "out_of_range")
    assert (third.row, third.line) == (3, 6)


def test_long_fields(read, rejected):
    assert len(prompts(read("prompt\n" + "x" * 65_536 + "\n"))[0]) == 65_536
    (error,) = read('prompt,seed\n"' + "x" * 65_537 + '",1\n')
    assert (error.code, error.column, error.row) == ("field_too_long", "prompt", 1)
    assert read("x" * 70_000, "p.txt")[0].code == "field_too_long"
    assert read(json.dumps({"prompt": "x" * 70_000}), "p.jsonl")[0].code == "field_too_long"
    assert rejected("prompt\n" + "x" * 200_000 + "\n").code == "quote_unclosed"
    assert rejected('{"prompt": "a"}\n{"prompt": "' + "x" * (5 << 20) + '"}', "p.jsonl").code == "line_too_long"


def test_ragged_rows(read):
    few, many, good = read("prompt,seed,mood\na,1\na cat, on a mat,1,x\nb,2,y\n")
    assert (few.code, few.line, few.column) == ("too_few_fields", 2, "mood")
    assert (many.code, many.line) == ("too_many_fields", 3) and "quote" in many.message
    assert isinstance(good, Row)


def test_blank_rows_of_spreadsheets_are_passed_over(read):
    assert prompts(read("prompt,seed\n\na,1\n,\n\n\nb,2\n,\n")) == ["a", "b"]


# F5: delimiters and headers


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_header_alone_tells_the_delimiter(read, delimiter):
    text = f"seed{delimiter}prompt\n" + f'1{delimiter}"a, b; c | d\te, f; g"\n'
    items = read(text)
    assert prompts(items) == ["a, b; c | d\te, f; g"] and items[0].seed == 1


def test_a_single_column_of_prompts_full_of_commas_needs_quotes(read):
    (error,) = read("prompt\na cat, a dog; a bird\n")
    assert error.code == "too_many_fields"
    assert prompts(read('prompt\n"a cat, a dog; a bird"\n')) == ["a cat, a dog; a bird"]


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=;"])
def test_excels_separator_line(read, first):
    items = read(f"{first}\r\nprompt;steps\r\na, b;3\r\nc;0\r\n")
    assert items[0].prompt == "a, b" and (items[1].line, items[1].row) == (4, 2)


def test_every_alias_is_accepted_however_it_is_written():
    names = ColumnNames({})
    for column, aliases in ALIASES.items():
        for alias in aliases:
            for written in (
                alias,
                alias.upper(),
                alias.title().replace("_", " "),
                alias.replace("_", "-"),
                f" {alias} ",
            ):
                assert names.resolve(written) == column
    for letter in "pnwhfdsglc":
        assert names.resolve(letter) is None


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("prompt,Caption", "duplicate_column"),
        ("prompt,num_frames,Frames", "duplicate_column"),
        ("prompt,mood,mood", "duplicate_column"),
        ("scene,seed", "missing_prompt"),
        ("p,n,s", "missing_prompt"),
    ],
)
def test_headers_that_cant_be_used(rejected, header, code):
    error = rejected(f"{header}\na,b,c\n")
    assert (error.code, error.errors[0].line) == (code, 1) and error.hint
    if code == "missing_prompt":
        assert repr(header.split(",")[0]) in str(error) and "--map" in error.hint


@pytest.mark.parametrize(
    ("content", "name", "code"),
    [
        ("", "p.csv", "empty_file"),
        (" \n\r\n", "p.csv", "empty_file"),
        (codecs.BOM_UTF8, "p.csv", "empty_file"),
        ("prompt,seed\n", "p.csv", "no_rows"),
        ("prompt,seed\n\n\n", "p.csv", "no_rows"),
        ("# only\n# comments\n", "p.txt", "no_rows"),
        ("sep=;\n", "p.csv", "empty_file"),
        ("a cat runs\na dog runs\n", "-", "unknown_format"),
        ('[{"prompt": "a"}]', "p.json", "unknown_format"),
        ('{\n  "prompt": "a"\n}', "p.json", "unknown_format"),
    ],
)
def test_files_without_rows_or_format(rejected, content, name, code):
    assert rejected(content, name).code == code


@pytest.mark.parametrize(
    ("content", "name", "format"),
    [
        ("prompt,seed\na,1\n", "p.csv", "csv"),
        ("prompt\tseed\na\t1\n", "p.tsv", "tsv"),
        ("prompt\tseed\na\t1\n", "p.txt", "tsv"),  # Excel's "Unicode text"
        ("prompt,seed\na,1\n", "p.txt", "csv"),
        ("a prompt, with a seed\n", "p.txt", "txt"),
        ("prompt,seed\na,1\n", "-", "csv"),
        ('{"prompt": "a"}\n', "-", "jsonl"),
        ('{"prompt": "a"}\n', "p.ndjson", "jsonl"),
        ('{"custom_id": "1", "body": {"prompt": "a"}}\n', "p.jsonl", "openai"),
        ("PROMPT;x\na;1\n", "p.data", "csv"),
    ],
)
def test_formats_are_detected(source, content, name, format):
    assert detect(source(content, name), ColumnNames({})).format == format


# TXT


def test_inline_flags(read):
    text = (
        "# sample prompts\n\n"
        "a cat -- at dusk --w 832 --h 480 --f 81 --d 42 --s 20 --g 7.5 --fs 3 --n low quality, blurry\n"
        "  a dog --l 4\n"
        'a bird --seed 7 --negative_prompt "low quality"\n'
    )
    cat, dog, bird = read(text, "p.txt")
    assert (cat.prompt, cat.seed, cat.row, cat.line) == ("a cat -- at dusk", 42, 1, 3)
    wanted = replace(
        WIDE.defaults, width=832, height=480, frames=81, steps=20, guidance_scale=7.5, shift=3.0,
        negative_prompt="low quality, blurry",
    )  # fmt: skip
    assert cat.parameters == wanted
    assert (dog.prompt, dog.parameters.guidance_scale, dog.line) == ("a dog", 4.0, 4)
    assert (bird.seed, bird.parameters.negative_prompt) == (7, "low quality")


@pytest.mark.parametrize(
    ("line", "code", "column"),
    [
        ("a cat --ar 16:9", "unknown_flag", "--ar"),
        ("a cat --g 3 --l 4", "duplicate_key", "--l"),
        ("a cat --s none", "not_a_number", "--s"),
        ("--w 832 --h 480", "empty_prompt", "prompt"),
        ("a cat --w 832", "conflict", "--w"),
    ],
)
def test_wrong_flags(read, line, code, column):
    good, error = read(f"fine\n{line}\n", "p.txt")
    assert isinstance(good, Row) and (error.code, error.column, error.line) == (code, column, 2)


# JSON


def test_json_lines(read):
    first, second = read(
        '{"video_prompt": "a cat", "infer_steps": 30, "seed": 5, "guidance": 6.5, "tags": ["a", {"b": null}], "id": 17}\n'
        '\n{"prompt": "a dog", "seed": null, "target_fps": 24.0}\n',
        "p.jsonl",
    )
    assert (first.prompt, first.seed, first.external_id, first.parameters.steps) == ("a cat", 5, "17", 30)
    assert first.extra == {"tags": ["a", {"b": None}]}
    assert (second.row, second.line, second.parameters.fps) == (2, 3, 24)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('{"prompt": "a", "prompt": "b"}', "duplicate_key"),
        ('{"prompt": "a", "x": {"y": 1, "y": 2}}', "duplicate_key"),
        ('{"prompt": "a", "caption": "b"}', "duplicate_key"),
        ('{"prompt": "a", "cfg": NaN}', "json"),
        ('{"prompt": "a", "x": -Infinity}', "json"),
        ('{"prompt": "a", "x": 1e999}', "json"),
        ('{"prompt": "a"', "json"),
        ('{"prompt": "a"} {"prompt": "b"}', "json"),
        ('"a"', "json"),
        ("[1]", "json"),
        ("[" * 100_000, "json"),
        ('{"prompt": "a", "x": ' + "9" * 5000 + "}", "json"),
        ('{"prompt": ["a"]}', "value_type"),
        ('{"prompt": "a", "seed": true}', "value_type"),
        ('{"prompt": "a", "seed": 1.5}', "not_a_number"),
        ('{"seed": 1}', "empty_prompt"),
    ],
)
def test_wrong_json_lines(read, line, code):
    good, error, after = read('{"prompt": "x"}\n' + line + '\n{"prompt": "y"}\n', "p.jsonl")
    assert isinstance(good, Row) and isinstance(after, Row)
    assert (error.code, error.row, error.line) == (code, 2, 2)


def test_openai_batch(read):
    (row,) = read(
        json.dumps({
            "custom_id": "r-1", "method": "POST", "url": "/v1/videos",
            "body": {"prompt": "a cat", "seconds": "4", "size": "1280x720", "model": "sora", "quality": "high"},
        }),
        "b.jsonl",
    )  # fmt: skip
    assert (row.external_id, row.prompt, row.parameters.width, row.parameters.frames) == ("r-1", "a cat", 1280, 33)
    assert row.extra == {"model": "sora", "quality": "high"}


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"custom_id": ""}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "/v1/chat/completions"}, "url"),
        ({"body": "a cat"}, "body"),
    ],
)
def test_wrong_openai_requests(read, change, column):
    request = {"custom_id": "r", "method": "POST", "url": "/v1/videos", "body": {"prompt": "a"}}
    good, error = read(json.dumps(request) + "\n" + json.dumps(request | change), "b.jsonl", format="openai")
    assert isinstance(good, Row) and (error.code, error.column) == ("openai_request", column)


# Files of others


@pytest.mark.parametrize(
    ("header", "line", "prompt", "extra"),
    [
        ("uuid,prompt,time,toxicity", "u1,a cat,2024-01-01,0.1", "a cat", {"time": "2024-01-01", "toxicity": "0.1"}),
        ("prompt,concept,motion_level", "a cat,animal,high", "a cat", {"concept": "animal", "motion_level": "high"}),
        ("name,prompt,negative_prompt,seed", "x,a cat,bad,-1", "a cat", {}),
        ("filename,positive_prompt,negative_prompt,seed", "x.mp4,a cat,bad,1", "a cat", {}),
        ("prompt,duration,resolution,fps,notes", "a cat,2s,480p,16,hello", "a cat", {"notes": "hello"}),
    ],
)
def test_files_people_have(read, header, line, prompt, extra):
    (row,) = read(f"{header}\n{line}\n")
    assert (row.prompt, row.extra) == (prompt, extra)


# Round trip

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
ROWS = st.lists(
    st.fixed_dictionaries({"prompt": TEXT.map("a".__add__), "mood": TEXT, "seed": st.integers(0, 2**63 - 1)}),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, delimiter=st.sampled_from(",;\t|"), newline=st.sampled_from(["\n", "\r\n"]), bom=st.booleans())
def test_what_csv_writes_comes_back(tmp_path, rows, delimiter, newline, bom):
    path = tmp_path / "p.csv"
    with path.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        # With "\n" as the line's end, csv.writer leaves a lone "\r" unquoted and can't read it back itself.
        quoting = csv.QUOTE_MINIMAL if newline == "\r\n" else csv.QUOTE_ALL
        columns = ["prompt", "mood", "seed"]
        writer = csv.DictWriter(file, columns, delimiter=delimiter, lineterminator=newline, quoting=quoting)
        writer.writeheader()
        writer.writerows(rows)
    items = list(read_batch(Source(path, "p.csv"), IngestOptions(WIDE)))
    assert [(row.prompt, row.extra.get("mood", ""), row.seed) for row in items] == [
        (row["prompt"], row["mood"], row["seed"]) for row in rows
    ]
    # Every row's line is where it begins in the file.
    text = path.read_text(encoding="utf-8-sig")
    for row in items:
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        assert lines[row.line - 1].lstrip('"').startswith("a")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, ascii=st.booleans())
def test_what_json_writes_comes_back(tmp_path, rows, ascii):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows), encoding="utf-8", newline="")
    items = list(read_batch(Source(path, "p.jsonl"), IngestOptions(WIDE)))
    assert [(row.prompt, row.extra["mood"], row.seed) for row in items] == [
        (row["prompt"], row["mood"], row["seed"]) for row in rows
    ]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=200) | st.text('",;\n\r\tprompt seed=a1{}[]\\u0"', max_size=80).map(str.encode),
    name=st.sampled_from(["p.csv", "p.tsv", "p.txt", "p.jsonl", "-"]),
)
def test_any_bytes_end_in_rows_or_coded_errors(tmp_path, content, name):
    path = tmp_path / "p"
    path.write_bytes(content)
    try:
        items = list(read_batch(Source(path, name), IngestOptions(WIDE)))
    except FileRejected as error:
        assert error.code in FILE_CODES and error.errors
    else:
        assert items and all(isinstance(item, Row | RowError) for item in items)
        for item in items:
            json.dumps(item.extra if isinstance(item, Row) else item.message).encode()
