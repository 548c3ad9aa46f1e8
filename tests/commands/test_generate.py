"""`bert generate` and `bert evaluate` on a model's folder, a stream with bad lines, and files of text."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import sys
from pathlib import Path

import pytest

import bert
from bert.commands import main
from bert.commands.cli.arguments import run_program
from bert.commands.language_models import generate_command as generate
from bert.config import Decoding, TokenizerConfig
from bert.inference.generate import Continuation
from bert.inference.pretrained import Pretrained
from bert.model.names import ENCODER_DECODER
from bert.tokenizer.wordpiece import train_wordpiece
from tests.language_models import POSITIONS, WORDS, language_model
from tests.messages import has_all

pytestmark = pytest.mark.medium

GPT2 = {"hidden_act": "gelu_tanh", "embedding_norm": False, "prediction_transform": False, "prediction_bias": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 folder of a random model."""
    out = tmp_path_factory.mktemp("gpt2") / "model"
    language_model(**GPT2).save(out)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> Pretrained:
    return bert.load(folder)


def feed(monkeypatch: pytest.MonkeyPatch, inputs: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(inputs)))


def test_a_prompt_is_continued_as_in_python(folder: Path, model: Pretrained, tmp_path: Path, capsysbinary) -> None:
    assert main(["generate", str(folder), "the cat", "--max_tokens", "7"]) == 0
    assert capsysbinary.readouterr().out == model.generate("the cat", max_tokens=7).encode() + b"\n"
    output = tmp_path / "answer.txt"
    arguments = ["--temperature", "1.5", "--top_k", "20", "--top_p", "0.9", "--seed", "3", "--max_tokens", "7"]
    assert main(["generate", str(folder), "", *arguments, "--output", str(output)]) == 0
    expected = model.generate("", temperature=1.5, top_k=20, top_p=0.9, seed=3, max_tokens=7)
    assert output.read_bytes() == expected.encode() + b"\n"
    assert capsysbinary.readouterr().out == b""


def test_a_prompt_of_several_lines_is_read_from_a_file(folder: Path, model, tmp_path: Path, capsysbinary) -> None:
    """The line break that an editor writes at the end is not part of the prompt."""
    examples = "a dog -> the dog\na hat -> the hat\na cat ->"
    (tmp_path / "examples.txt").write_text(f"{examples}\n")
    arguments = ["--max_tokens", "5", "--from_file"]
    assert main(["generate", str(folder), str(tmp_path / "examples.txt"), *arguments]) == 0
    assert capsysbinary.readouterr().out == model.generate(examples, max_tokens=5).encode() + b"\n"


def test_several_continuations_are_lines_with_scores(folder: Path, model: Pretrained, capsys) -> None:
    arguments = ["--beams", "3", "--num_samples", "2", "--length_penalty", "0.5", "--early_stopping"]
    assert main(["generate", str(folder), "a dog", "--max_tokens", "5", *arguments]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    settings = {"beams": 3, "num_samples": 2, "length_penalty": 0.5, "early_stopping": True, "max_tokens": 5}
    expected = model.generate("a dog", details=True, **settings)
    assert [(line["prompt"], line["text"]) for line in lines] == [("a dog", one.text) for one in expected]
    assert [line["score"] for line in lines] == pytest.approx([one.score for one in expected])


def test_a_bad_line_gets_its_error_and_the_others_their_answers(folder: Path, model, monkeypatch, capsys) -> None:
    long = b"e" * POSITIONS
    arguments = ["--temperature", "1", "--max_tokens", "4", "--seed", "9"]
    feed(monkeypatch, b"the\n\nko \xff\n" + long + b"\na dog\n")
    assert main(["generate", str(folder), "-", *arguments]) == 2
    out, error = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line.get("prompt", line.get("text")) for line in lines] == ["the", "", "ko \ufffd", long.decode(), "a dog"]
    assert ["error" in line for line in lines] == [False, False, True, True, False]
    expected = model.generate(["the", "", "a", "a", "a dog"], temperature=1, max_tokens=4, seed=9)
    assert [lines[i]["text"] for i in (0, 1, 4)] == [expected[i] for i in (0, 1, 4)]
    assert error.splitlines()[-1].startswith(
        "error: standard input: 2 of 5 inputs have no answer, the first on line 3: not UTF-8"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--beams", "0"], "command line: --beams is 0: it must be at least 1"),
        (["x", "--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
        (["x", "--batch_size", "0"], "command line: --batch_size is 0: it must be at least 1"),
        (["\udcff"], "command line: the prompt is not UTF-8"),
        ([], "the following arguments are required: PROMPT"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: list[str], words: str, folder: Path, fails) -> None:
    assert words in fails(generate, str(folder), *arguments)


def test_settings_that_contradict_each_other_are_one_sentence(folder: Path, capsys) -> None:
    assert run_program(generate)([str(folder), "x", "--top_k", "3"]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("error: command line: --top_k is 3, but --temperature is 0")
    )


def test_an_encoder_decoder_has_settings_of_its_own(tmp_path: Path, monkeypatch, capsys) -> None:
    """Uses the decoding settings of its evaluation, unless others are given."""
    asked: list[Decoding] = []

    def generator(texts: list[str], decoding: Decoding, *_: object) -> list[list[Continuation]]:
        asked.append(decoding)
        return [[Continuation(text, 0.0, [], True)] * decoding.num_samples for text in texts]

    own = Decoding(max_tokens=9, beams=3, length_penalty=0.8)
    model = dataclasses.replace(language_model(), architecture=ENCODER_DECODER, decoding=own)
    monkeypatch.setattr(Pretrained, "_text_generator", property(lambda model: generator))
    monkeypatch.setattr("bert.inference.load.load", lambda *_, **adapter: model)
    for options in ([], ["--num_samples=2"], ["--beams=2"], ["--temperature=0.5"]):
        assert generate([str(tmp_path), "x", *options]) == 0
    replaced = functools.partial(dataclasses.replace, own)
    assert asked == [own, replaced(num_samples=2), replaced(beams=2), replaced(beams=1, temperature=0.5)]
    asked.clear()
    sampled = dataclasses.replace(model, decoding=Decoding(temperature=1.0, top_k=5))
    sampled.generate("x", beams=4)
    assert asked == [Decoding(beams=4)]


def test_other_models_and_files_that_exist_are_refused(folder: Path, finetuned: Path, tmp_path: Path, fails) -> None:
    assert "is not a left-to-right language model" in fails(generate, str(finetuned), "x")
    (tmp_path / "old.txt").touch()
    assert "old.txt exists already" in fails(generate, str(folder), "x", "--output", str(tmp_path / "old.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    for name, words in (("latin.txt", "latin.txt is not UTF-8"), ("none.txt", "none.txt cannot be read (No such file")):
        assert words in fails(generate, str(folder), str(tmp_path / name), "--from_file")


def test_no_prompt_and_one_that_is_too_long_are_one_sentence(folder: Path, monkeypatch, capsys) -> None:
    feed(monkeypatch, b"")
    for prompt, words in (("-", "standard input holds no input"), ("e" * 500, "has 500 tokens, but")):
        assert main(["generate", str(folder), prompt]) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]


TEXT = "the cat sat\non the mat\n\n  “cats” and dogs\r\n"


def test_a_text_is_measured_by_token_character_and_byte(folder: Path, model, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    assert main(["evaluate", str(folder), str(tmp_path / "a.txt"), "--stride", "6"]) == 0
    result = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    score = model.score(TEXT, stride=6)
    loss = -score.log_probability / score.num_tokens
    assert int(result["tokens"]) == score.num_tokens
    assert float(result["loss"]) == pytest.approx(loss, abs=1e-5)
    assert float(result["perplexity"]) == pytest.approx(math.exp(loss), rel=1e-4)
    bits = -score.log_probability / math.log(2)
    assert float(result["bits per character"]) == pytest.approx(bits / len(TEXT), abs=1e-5)
    assert float(result["bits per byte"]) == pytest.approx(bits / len(TEXT.encode()), abs=1e-5)
    rows = [json.dumps({"text": text}) for text in (TEXT, "a dog")]
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    assert main(["evaluate", str(folder), str(tmp_path / "b.jsonl")]) == 0
    assert f"tokens: {sum(score.num_tokens for score in model.score([TEXT, 'a dog']))}" in capsys.readouterr().out


def test_a_vocabulary_that_loses_text_has_no_bits(monkeypatch, tmp_path: Path, capsys) -> None:
    tokenizer = train_wordpiece(WORDS, TokenizerConfig(vocab_size=120, min_frequency=1))
    monkeypatch.setattr("bert.inference.load.load", lambda run, log, **adapter: language_model(tokenizer))
    (tmp_path / "a.txt").write_text("The cat!\n")
    assert main(["evaluate", str(tmp_path), str(tmp_path / "a.txt")]) == 0
    out = capsys.readouterr().out
    assert "perplexity: " in out
    assert "bits per byte: none, as the vocabulary is not byte-level\n" in out
    (tmp_path / "blank.txt").write_text("\n \n\n")
    assert main(["evaluate", str(tmp_path), str(tmp_path / "blank.txt")]) == 2
    assert "blank.txt has no token" in capsys.readouterr().err


def test_what_cannot_be_measured_is_one_sentence(
    folder: Path, finetuned: Path, pretrained: Path, tmp_path: Path, fails, capsys
) -> None:
    from bert.commands.language_models import evaluate_command as evaluate

    (tmp_path / "a.txt").write_text("the\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert "a.txt has no rows" in fails(evaluate, str(finetuned), str(tmp_path / "a.txt"))
    assert "is not a left-to-right language model" in fails(evaluate, str(pretrained), str(tmp_path / "a.txt"))
    assert "latin.txt" in (error := fails(evaluate, str(folder), str(tmp_path / "latin.txt"))) and "UTF-8" in error
    assert "empty.txt holds no text" in fails(evaluate, str(folder), str(tmp_path / "empty.txt"))
    (tmp_path / "a.json").write_text("{}")
    assert has_all(fails(evaluate, str(folder), str(tmp_path / "a.json")), "a.json may be one", "JSON")
    assert "none.txt does not exist" in fails(evaluate, str(folder), str(tmp_path / "none.txt"))
    assert "--stride is 0" in fails(evaluate, str(folder), str(tmp_path / "a.txt"), "--stride", "0")
    assert main(["evaluate", str(folder), str(tmp_path / "a.txt"), "--stride", "99"]) == 2
    assert "stride is 99, but" in capsys.readouterr().err.splitlines()[-1]
