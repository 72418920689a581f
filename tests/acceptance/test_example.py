"""The main job: the example catalogue becomes videos, and everything that can be asked about it afterwards."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from chorus_batch.chorus.tiny.world import BACKGROUNDS, COLOURS
from chorus_batch.workers.video import VideoInfo, probe

from .conftest import CATALOG, Cli, Example, run_script

ROWS = list(csv.DictReader(CATALOG.read_text().splitlines()))


def test_the_run_ends_well(example: Example) -> None:
    summary = example.ended.json
    assert summary["schema_version"] == 1
    assert (summary["state"], summary["done"], summary["total"]) == ("finished", 24, 24)
    assert (summary["failed"], summary["quarantined"], summary["cancelled"], summary["queued"]) == (0, 0, 0, 0)
    assert summary["hits"] > 0 and summary["exact_hits"] == 1
    assert summary["steps_total"] == 24 * 4 and summary["steps_skipped"] >= summary["hits"]
    assert summary["forecast"]["rows"] == 24


def test_what_was_planned_is_what_was_done(example: Example) -> None:
    summary = example.ended.json
    forecast = summary["forecast"]
    assert summary["hits"] == forecast["followers"] + forecast["duplicates"]
    # A worker may find an entry that bears more than the planned one, and never takes one that bears less.
    steps = forecast["ranges"]["steps_skipped"]
    assert forecast["steps_skipped"] == steps["expected"] <= summary["steps_skipped"] <= steps["high"]


def test_data_and_talk_are_kept_apart(example: Example) -> None:
    assert len(example.ended.lines) == 1
    assert "24 videos" in example.ended.err and "computed in full" in example.ended.err
    assert "Warning" not in example.ended.err and "\x1b" not in example.ended.err


def test_the_worker_of_wait_is_gone_afterwards(local: Cli) -> None:
    assert local("worker", "list", "--json").out == ""


# Results


@pytest.fixture(scope="module")
def folder(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that `results` gives, in a process of its own."""
    folder = tmp_path_factory.mktemp("results") / "new" / "folder"
    ended = run_script(
        "results",
        example.batch,
        "-o",
        folder,
        "--what",
        "video,latents,sidecar,sheet",
        "--json",
        data_dir=example.data_dir,
    )
    assert ended.code == 0, ended.err
    assert ended.json == {
        "schema_version": 1,
        "files": 48,
        "fetched": 48,
        "manifest": str(folder / "manifest.jsonl"),
        "lost": [],
    }
    return folder


@pytest.fixture(scope="module")
def manifest(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


def test_every_row_has_a_video_that_plays(folder: Path, manifest: list[dict[str, Any]]) -> None:
    assert [row["id"] for row in manifest] == [f"clip-{n:02}" for n in range(1, 25)]
    for row in manifest:
        video = folder / row["file"]
        assert probe(video) == VideoInfo(64, 64, 9, 8.0, "h264", "yuv420p")
        assert video.stat().st_size == row["bytes"]
    assert manifest[0]["file"].startswith("clip-01-a-red-circle-moves-right")


def test_the_manifest_says_what_was_asked_and_done(manifest: list[dict[str, Any]]) -> None:
    for row, asked in zip(manifest, ROWS, strict=True):
        assert (row["prompt"], row["seed"], row["state"]) == (asked["prompt"], int(asked["seed"]), "done")
        assert (row["error_code"], row["steps_total"]) == (None, 4)
        assert {"miss": row["steps_computed"] == 4, "exact": row["steps_computed"] == 0}.get(
            row["cache_result"], 0 < row["steps_computed"] < 4
        )
        assert (row["source"] is None) == (row["cache_result"] == "miss")
    assert [row["id"] for row in manifest if row["cache_result"] == "exact"] == ["clip-20"]
    assert manifest[19]["sha256"] == manifest[0]["sha256"]
    assert len({row["sha256"] for row in manifest}) == 23


def test_hits_come_from_similar_prompts(manifest: list[dict[str, Any]]) -> None:
    hits = [row for row in manifest if row["cache_result"] == "semantic"]
    assert len(hits) >= 8
    assert all(0.79 <= row["similarity"] < 1.0 for row in hits)


def test_sidecars_and_the_sheet(folder: Path, manifest: list[dict[str, Any]]) -> None:
    from PIL import Image

    for row in manifest:
        assert json.loads((folder / row["file"]).with_suffix(".json").read_text()) == {**row}
        assert (folder / row["file"]).with_suffix(".safetensors").stat().st_size > 0
    with Image.open(folder / "contact_sheet.png") as sheet:
        assert sheet.width > 900 and sheet.height > 12 * 96
    assert len(list(folder.iterdir())) == 24 * 3 + 2


def shown_colour(video: Path, background: str) -> str:
    """The colour of most pixels that aren't background, in the middle of the video; nothing where all are."""
    with av.open(str(video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    pixels = frames[len(frames) // 2].reshape(-1, 3).astype(float)
    palette = {name: rgb for name, rgb in COLOURS.items() if name != background} | {"": BACKGROUNDS[background]}
    distances = np.linalg.norm(pixels[:, None] - np.array(list(palette.values()), float)[None], axis=2)
    counts = Counter(np.array(list(palette))[distances.argmin(axis=1)].tolist())
    del counts[""]
    return next((name for name, _ in counts.most_common(1)), "")


def test_most_videos_show_the_colour_that_was_asked_for(folder: Path, manifest: list[dict[str, Any]]) -> None:
    right = 0
    for row in manifest:
        words = row["prompt"].replace(",", "").split()
        background = words[words.index("background") - 1]
        colour = next(word for word in words if word in COLOURS and word != background)
        right += shown_colour(folder / row["file"], background) == colour
    assert right >= 18


def test_what_is_there_is_not_fetched_again(example: Example, folder: Path, local: Cli) -> None:
    again = local("results", example.batch, "-o", folder, "--json")
    assert (again.code, again.json["files"], again.json["fetched"]) == (0, 24, 0)
    assert local("results", example.batch, "-o", folder, "-q").lines == [str(folder / "manifest.jsonl")]


def test_a_manifest_for_spreadsheets(example: Example, tmp_path: Path, local: Cli) -> None:
    ended = local("results", example.batch, "-o", tmp_path, "--manifest", "csv", "--name-template", "{row:03}")
    assert ended.code == 0 and "24 files (24 fetched)" in ended.out
    rows = list(csv.DictReader((tmp_path / "manifest.csv").read_text().splitlines()))
    assert [row["file"] for row in rows] == [f"{n:03}.mp4" for n in range(1, 25)]
    assert all((tmp_path / row["file"]).stat().st_size == int(row["bytes"]) for row in rows)


def test_links_instead_of_files(example: Example, tmp_path: Path, local: Cli) -> None:
    import urllib.request

    assert local("results", example.batch, "-o", tmp_path, "--presign", "60").code == 0
    first = json.loads((tmp_path / "manifest.jsonl").read_text().splitlines()[0])
    with urllib.request.urlopen(first["file"]) as answer:
        assert len(answer.read()) == first["bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.jsonl"]


# Figures


def sql(local: Cli, query: str) -> list[dict[str, Any]]:
    ended = local("sql", query, "--format", "json")
    assert ended.code == 0, ended.err
    return ended.objects


def test_stats_are_those_of_the_views(example: Example, local: Cli) -> None:
    stats = local("stats", example.batch, "--json").json
    (view,) = sql(local, f"SELECT * FROM cache_hits_by_batch WHERE batch_id = {example.batch}")
    assert {name for name in view if name in stats} >= {"hits", "steps_skipped", "seconds", "finished", "hit_rate"}
    assert {name: stats[name] for name in view if name in stats} == {name: view[name] for name in view if name in stats}
    summary = example.ended.json
    assert (stats["hits"], stats["steps_skipped"]) == (summary["hits"], summary["steps_skipped"])
    assert stats["seconds"] == pytest.approx(summary["seconds_compute"])
    assert stats["seconds_by_phase"]["denoise"] > 0
    (own,) = sql(
        local,
        "SELECT count(*) FILTER (WHERE cache_result <> 'miss') AS hits, sum(steps_total - steps_computed) AS skipped,"
        f" sum(seconds_total) AS seconds FROM generations JOIN jobs ON id = job_id WHERE batch_id = {example.batch}",
    )
    assert (own["hits"], own["skipped"]) == (stats["hits"], stats["steps_skipped"])
    assert own["seconds"] == pytest.approx(stats["seconds"])
    everything = local("stats", "--json").json
    (days,) = sql(local, "SELECT sum(hits) AS hits, sum(steps_skipped) AS skipped FROM cache_hits_by_day")
    assert (everything["hits"], everything["steps_skipped"]) == (days["hits"], days["skipped"])


def test_stats_for_people(example: Example, local: Cli) -> None:
    ended = local("stats", example.batch)
    hits = str(example.ended.json["hits"])
    assert any(line.split() == ["hits", hits] for line in ended.lines)
    assert any(line.startswith("denoise") for line in ended.lines)


def test_ones_own_sql_in_each_form(example: Example, local: Cli) -> None:
    query = "SELECT block, jobs, hits, hit_rate FROM hit_rate_per_100 ORDER BY block"
    (block, *_) = sql(local, query)
    assert block["schema_version"] == 1 and block["hits"] > 0 and block["hit_rate"] == block["hits"] / block["jobs"]
    table = local("sql", "select * from hit_rate_per_100").lines
    assert table[0].split() == ["block", "first_finished_at", "last_finished_at", "jobs", "hits", "hit_rate"]
    rows = list(csv.reader(io.StringIO(local("sql", query, "--format", "csv").out)))
    assert rows[0] == ["block", "jobs", "hits", "hit_rate"]
    assert [float(cell) for cell in rows[1]] == [block[name] for name in rows[0]]
    assert local("sql", "-", stdin=query.encode()).lines[0].split() == rows[0]


def test_ones_own_sql_in_a_process_of_its_own(example: Example) -> None:
    ended = run_script(
        "sql", "select hits from cache_hits_by_batch order by 1 desc", "--format", "csv", data_dir=example.data_dir
    )
    assert (ended.code, ended.err) == (0, "")
    assert ended.lines[0] == "hits" and int(ended.lines[1]) >= example.ended.json["hits"]


def test_values_that_json_lacks(local: Cli) -> None:
    query = """
        SELECT now() - now() AS a, '12:30'::time AS b, 1.5::numeric AS c, 3::numeric AS d, '\\x0102'::bytea AS e,
            '{"x": [1]}'::jsonb AS f, NULL AS g, 'b5a8e6a0-0000-4000-8000-000000000000'::uuid AS h, '10.0.0.1'::inet AS i,
            '[1,2)'::int4range AS j, 'NaN'::numeric::text AS k
    """
    (row,) = sql(local, query)
    assert [row[name] for name in "abcdefgk"] == [0.0, "12:30:00", 1.5, 3, "0102", {"x": [1]}, None, "NaN"]
    assert (row["h"], row["i"]) == ("b5a8e6a0-0000-4000-8000-000000000000", "10.0.0.1")


def test_brackets_are_no_markup(local: Cli) -> None:
    ended = local("sql", "SELECT '[red]a[/red] [/b] :smile:' AS \"[b]x[/b]\"")
    assert [line.rstrip() for line in ended.lines] == ["[b]x[/b]", "[red]a[/red] [/b] :smile:"]


def test_long_cells_stay_on_one_line_in_a_pipe(local: Cli) -> None:
    assert local("sql", "SELECT repeat('x', 500) AS x, 'y' AS y").lines[1].split() == ["x" * 500, "y"]


# Asking


def test_the_batch_is_listed(example: Example, local: Cli) -> None:
    mine = [found for found in local("list", "--json").objects if str(found["batch_id"]) == example.batch]
    assert [found["schema_version"] for found in mine] == [1]
    assert example.batch in local("ls", "-q").lines
    name = example.ended.json["name"]
    assert any(line.startswith(f"{example.batch}  {name}  finished  24/24 done") for line in local("list").lines)


def test_status(example: Example, local: Cli) -> None:
    found = local("status", example.batch, "--json").json
    counts = [found[name] for name in ("queued", "running", "done", "failed", "quarantined", "cancelled")]
    assert sum(counts) == found["total"] == 24 and found["schema_version"] == 1
    name = example.ended.json["name"]
    assert local("status", name).out.startswith(f"{name}  finished  24/24 done  0 failed")
    assert local("status", name, "-q").lines == [example.batch]
    assert local("status", name, "--watch").out == local("status", name).out
    assert local("wait", name, "-q").lines == [example.batch]


def test_jobs_and_one_job(example: Example, local: Cli) -> None:
    rows = local("jobs", example.batch, "--json").objects
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    assert {row["schema_version"] for row in rows} == {1}
    assert local("jobs", example.batch, "-q").lines == [str(row["job"]) for row in rows]
    table = local("jobs", example.batch).lines
    assert table[0].split()[:4] == ["JOB", "ID", "STATE", "CACHE"] and len(table) == 25
    assert local("jobs", example.batch, "--state", "failed", "--json").out == ""
    hit = next(row for row in rows if row["cache_result"] == "semantic")
    shown = local("show", str(hit["job"]), "--json").json
    assert shown["schema_version"] == 1 and shown["generation"]["k1"] == 1
    assert shown["entry"]["job_id"] == hit["source"] and shown["attempts"][0]["result"] == "done"
    assert shown["generation"]["forward_passes"] > 0 and shown["generation"]["flops"] > 0
    text = local("show", f"{example.batch}/{hit['id']}").out
    assert f"reused      entry {shown['entry']['id']} of job {hit['source']}" in text
    assert "computed    3 of 4 steps" in text and hit["prompt"] in text and "seconds" in text
    assert local("show", str(hit["job"]), "-q").lines == [str(hit["job"])]
    linked = next(row for row in rows if row["cache_result"] == "exact")
    assert (
        f"reused      everything: job {rows[0]['job']} made the same request" in local("show", str(linked["job"])).out
    )
    missed = next(row for row in rows if row["cache_result"] == "miss")
    assert "reused      nothing" in local("show", str(missed["job"])).out


def test_the_cache(example: Example, local: Cli) -> None:
    sums = local("cache", "stats", "--json").json
    entries = local("cache", "ls", "--json").objects
    assert sums["schema_version"] == 1 and sums["entries"] == len(entries) == int(local("cache", "stats", "-q").out)
    assert sums["bytes"] == sum(entry["bytes"] for entry in entries) > 0
    semantic = example.ended.json["hits"] - example.ended.json["exact_hits"]
    assert sums["hits"] == sum(entry["hits"] for entry in entries) >= semantic
    assert all(entry["schema_version"] == 1 and entry["model"] == "builtin" for entry in entries)
    assert local("cache", "ls", "-q", "--limit", "1").lines == [str(entries[0]["entry_id"])]
    assert local("cache", "ls").lines[0].split()[:2] == ["ENTRY", "HITS"]


def test_servers_and_schema(local: Cli) -> None:
    servers = local("ps", "--json").objects
    assert [(found["name"], found["running"], found["schema_version"]) for found in servers] == [
        ("postgres", True, 1),
        ("broker", True, 1),
        ("store", True, 1),
    ]
    assert local("ps", "-q").lines == ["postgres", "broker", "store"]
    assert local("db", "check").lines == ["ok"]
    assert local("db", "current").out.split()[0] in local("db", "upgrade").out
    assert local("up").code == 0


def test_the_doctor(local: Cli) -> None:
    ended = local("doctor", "--json")
    findings = {found["name"]: found for found in ended.objects}
    wrong = [found for found in ended.objects if found["ok"] is False]
    assert (ended.code, wrong) == (0, [])
    assert set(findings) >= {"python", "disk", "servers", "database", "broker", "store", "embedder", "model"}
    assert all(found["schema_version"] == 1 for found in ended.objects)
    assert local("doctor", "-q").out == ""


# Again


def test_the_same_file_again_is_refused_quickly(example: Example) -> None:
    again = run_script("submit", CATALOG, "--set", "steps=4", data_dir=example.data_dir)
    assert (again.code, again.out) == (5, "")
    assert f"as batch {example.batch}" in again.err and "--new" in again.err
    assert again.seconds < 15


def test_a_second_batch_plans_with_the_cache(example: Example, local: Cli, tmp_path: Path) -> None:
    path = tmp_path / "more.csv"
    hit = next(row for row in local("jobs", example.batch, "--json").objects if row["cache_result"] == "semantic")
    path.write_text(f"prompt,seed\n{hit['prompt']},123\n")
    found = local("submit", path, "--set", "steps=4", "--dry-run", "--json")
    assert found.code == 0 and found.json["batch_id"] is None
    assert found.json["forecast"]["followers_of_cache"] == 1


def test_a_pipe_that_is_closed_early(example: Example) -> None:
    import subprocess

    from .conftest import SCRIPT, _environment

    command = f"'{SCRIPT}' jobs {example.batch} --json | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        check=False,
        capture_output=True,
        text=True,
        env=_environment(data_dir=example.data_dir),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")
