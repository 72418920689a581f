"""The differ that asks a model: the check of its answers, and the fallback, with real models of transformers' classes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chorus_batch.chorus import llm_differ
from chorus_batch.chorus.answers import AnswerFile
from chorus_batch.chorus.differ import Difference, Kind, LexicalDiffer, Scope
from chorus_batch.chorus.errors import WeightsError
from chorus_batch.chorus.llm_differ import InvalidAnswer, LlmDiffer, LocalModel, parse_answer, question
from tests.language_model import save_model

SOURCE = "A spotted dog runs in a park"
TARGET = "a black dog runs in a park"
VALID = {"kind": "attribute", "scope": "object", "source_phrase": "a spotted dog", "target_phrase": "a black dog"}


def test_a_valid_answer_is_mapped_to_spans() -> None:
    found = parse_answer(json.dumps(VALID), SOURCE, TARGET)
    assert found == Difference(Kind.attribute, Scope.object, "spotted dog", "black dog", ((2, 13),), ((2, 7),))


@pytest.mark.parametrize(
    "text",
    [
        "```json\n{}\n```",
        "Sure! {} I hope that this helps.",
        '{}\n\nA: a cat\nB: a dog\n{{"kind": "object"',
    ],
)
def test_what_a_model_writes_around_the_object_is_left_out(text: str) -> None:
    assert parse_answer(text.format(json.dumps(VALID)), SOURCE, TARGET).source_phrase == "spotted dog"


def test_words_left_out_give_no_new_words() -> None:
    answer = VALID | {"target_phrase": "dog"}
    found = parse_answer(json.dumps(answer), SOURCE, "a dog runs in a park")
    assert (found.target_phrase, found.target_spans) == ("dog", ())


def test_something_added_has_no_source_phrase() -> None:
    answer = {"kind": "object", "scope": "object", "source_phrase": "", "target_phrase": "red hat"}
    found = parse_answer(json.dumps(answer), "a dog", "a dog in a Red  hat")
    assert (found.source_phrase, found.source_spans) == ("", ())
    assert (found.target_phrase, found.target_spans) == ("Red  hat", ((11, 14), (16, 19)))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "colour"},
        {"kind": ["attribute"]},
        {"kind": None},
        {"scope": "global"},
        {"scope": "background"},  # an attribute isn't changed outside the object
        {"source_phrase": "spotted cat"},
        {"source_phrase": "spot"},  # no word of the prompt
        {"source_phrase": "black dog"},  # a word of the other prompt
        {"source_phrase": "?!"},
        {"source_phrase": "", "target_phrase": ""},
        {"target_phrase": 3},
        {"reason": "another colour"},
    ],
)
def test_invalid_answers(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidAnswer):
        parse_answer(json.dumps(VALID | change), SOURCE, TARGET)


@pytest.mark.parametrize(
    "text", ["", "attribute", "[1, 2]", '{"kind": "attribute"', "{'kind': 'attribute'}", "{" * 9999]
)
def test_what_is_no_object(text: str) -> None:
    with pytest.raises(InvalidAnswer):
        parse_answer(text, SOURCE, TARGET)


def test_a_missing_key_is_invalid() -> None:
    for key in VALID:
        with pytest.raises(InvalidAnswer):
            parse_answer(json.dumps({k: v for k, v in VALID.items() if k != key}), SOURCE, TARGET)


# --- Models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("random"))


def test_garbage_is_left_to_the_fallback_and_counted(random_model: Path) -> None:
    differ = LlmDiffer(random_model)
    found = [differ.compare(SOURCE, target) for target in (TARGET, "a cat")]
    assert found == [LexicalDiffer().compare(SOURCE, target) for target in (TARGET, "a cat")]
    assert (differ.calls, differ.fallbacks) == (2, 2)


def test_a_random_model_writes_the_same_each_time(random_model: Path) -> None:
    model = LocalModel(random_model, max_new_tokens=12)
    (first,), (second,) = (model.write(["A: a dog"]) for _ in range(2))
    assert first == second and first


def test_texts_of_any_length_are_answered_together_as_alone(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LocalModel(random_model, max_new_tokens=12)
    texts = ["A: a dog", "B", "a much longer text about two dogs, a cat and a boat", "A: a cow", "B: it rains"]
    alone = [model.write([text])[0] for text in texts]
    assert model.write(texts) == alone
    assert len(set(alone)) > 1
    monkeypatch.setattr(llm_differ, "AT_ONCE", 2)
    assert model.write(texts) == alone


PAIRS = [(SOURCE, TARGET), (SOURCE, SOURCE), (TARGET, SOURCE), (SOURCE, TARGET), ("a dog", "a red boat on a lake")]


def test_many_pairs_are_compared_as_each_alone(tmp_path: Path, random_model: Path) -> None:
    answer = {"kind": "several", "scope": "everything", "source_phrase": "dog", "target_phrase": "park"}
    for folder in (save_model(tmp_path, answer=json.dumps(answer)), random_model):
        alone, together = LlmDiffer(folder), LlmDiffer(folder)
        assert together.compare_many(PAIRS) == [alone.compare(*pair) for pair in PAIRS]
        assert (together.calls, together.fallbacks) == (alone.calls, alone.fallbacks)
        assert together.calls == 3


class Counting:
    """Writes what `model` does, and keeps what it was asked."""

    def __init__(self, folder: Path) -> None:
        self._model, self.asked = LocalModel(folder), list[list[str]]()

    def write(self, texts: Sequence[str]) -> list[str | None]:
        self.asked.append(list(texts))
        return self._model.write(texts)


def test_a_pair_is_asked_about_once(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting(random_model)
    differ = LlmDiffer(model)
    assert not differ.knows(SOURCE, TARGET) and differ.knows(SOURCE, SOURCE)
    differ.compare_many(PAIRS)
    assert model.asked == [[question(*PAIRS[i]) for i in (0, 2, 4)]]  # all in one go
    assert differ.knows(SOURCE, TARGET)
    differ.compare_many(PAIRS[::-1])
    assert len(model.asked) == 1
    # What wasn't needed for longest is forgotten.
    monkeypatch.setattr(llm_differ, "REMEMBERED", 2)
    differ.compare(*PAIRS[4])
    assert [differ.knows(*PAIRS[i]) for i in (0, 2, 4)] == [True, False, True]


def test_answers_outlive_the_process(tmp_path: Path, random_model: Path) -> None:
    first, second, other = (Counting(random_model) for _ in range(3))
    path = tmp_path / "answers.jsonl"
    found = LlmDiffer(first, answers=AnswerFile(path, "m")).compare_many(PAIRS)
    assert LlmDiffer(second, answers=AnswerFile(path, "m")).compare_many(PAIRS) == found
    assert (len(first.asked), second.asked) == (1, [])
    LlmDiffer(other, answers=AnswerFile(path, "another model")).compare_many(PAIRS)
    assert other.asked == first.asked


@pytest.mark.parametrize("chat", [False, True])
def test_what_a_model_answers_counts(tmp_path: Path, chat: bool) -> None:
    # Not what the lexical differ says of this pair.
    answer = {"kind": "several", "scope": "everything", "source_phrase": "dog", "target_phrase": "park"}
    differ = LlmDiffer(str(save_model(tmp_path, answer=json.dumps(answer), chat=chat)))
    found = differ.compare(SOURCE, TARGET)
    assert found == Difference(Kind.several, Scope.everything, "dog", "park", ((10, 13),), ((22, 26),))
    assert (differ.calls, differ.fallbacks) == (1, 0)


def test_a_prompt_that_does_not_fit_is_left_to_the_fallback(tmp_path: Path) -> None:
    differ = LlmDiffer(save_model(tmp_path, answer=json.dumps(VALID), room=512))
    assert differ.compare(SOURCE, TARGET) == LexicalDiffer().compare(SOURCE, TARGET)
    assert (differ.calls, differ.fallbacks) == (1, 1)


def test_the_same_prompt_is_not_asked_about(random_model: Path) -> None:
    differ = LlmDiffer(random_model)
    assert differ.compare(SOURCE, SOURCE) == LexicalDiffer().compare(SOURCE, SOURCE)
    assert differ.calls == 0


def test_another_fallback(random_model: Path) -> None:
    class Fixed:
        def compare(self, source: str, target: str) -> Difference:
            return Difference(Kind.style, Scope.everything, "", target, (), ())

    assert LlmDiffer(random_model, fallback=Fixed()).compare(SOURCE, TARGET).kind is Kind.style


def test_other_errors_are_not_swallowed() -> None:
    class Broken:
        def write(self, texts: Sequence[str]) -> list[str | None]:
            raise RuntimeError("out of memory")

    differ = LlmDiffer(Broken())
    with pytest.raises(RuntimeError, match="out of memory"):
        differ.compare(SOURCE, TARGET)
    assert differ.fallbacks == 0


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError):
        LlmDiffer(tmp_path / "none")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError):
        LlmDiffer(tmp_path).compare(SOURCE, TARGET)


def test_nothing_heavy_is_imported_before_a_model_is_asked() -> None:
    program = (
        "import sys; from chorus_batch.chorus import llm_differ; llm_differ.LlmDiffer(None); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_prompts_stand_in_a_line_each() -> None:
    assert question("a\n\ndog", "B: a  cat").endswith("\nA: a dog\nB: B: a cat\n")
