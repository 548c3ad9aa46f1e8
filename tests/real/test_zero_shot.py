"""Zero-shot classification next to transformers' pipeline, on a classifier of random weights on MiniLM."""

from __future__ import annotations

from pathlib import Path

import pytest

import bert

pytestmark = pytest.mark.real

TEXTS = ["I was charged twice for one month.", "The app closes when I log in.", "Where is Paris?"]
LABELS = ["invoices", "a crash", "geography", "sport"]


@pytest.mark.parametrize("multi_label", [False, True])
def test_labels_have_the_probabilities_of_the_pipeline(multi_label: bool, shared: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    source = shared / "models" / "all-MiniLM-L6-v2"
    torch.manual_seed(0)
    names = dict(enumerate(("contradiction", "neutral", "entailment")))
    model = library.AutoModelForSequenceClassification.from_pretrained(source, id2label=names)
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    model.save_pretrained(tmp_path / "nli")
    tokenizer = library.AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(tmp_path / "nli")
    pipeline = library.pipeline("zero-shot-classification", model=model.eval(), tokenizer=tokenizer, device="cpu")
    template = "This text is about {}."
    expected = pipeline(TEXTS, LABELS, hypothesis_template=template, multi_label=multi_label)
    answers = bert.load(tmp_path / "nli").zero_shot(TEXTS, LABELS, template, multi_label)
    for answer, theirs in zip(answers, expected, strict=True):
        assert list(answer.probabilities) == theirs["labels"]
        assert list(answer.probabilities.values()) == pytest.approx(theirs["scores"], abs=1e-5)
