"""RoFormers that transformers drew at random, read by us and written."""

import pytest

import bert
from bert.interchange import families
from tests.real.hf_models import AUTO, answers, assert_alike, assert_export, drawn, inputs, our_answers, real_inputs

pytestmark = pytest.mark.real

pytest.importorskip("torch", reason="needs the extra `torch`")
pytest.importorskip("transformers", reason="needs the extra `torch`")


@pytest.mark.parametrize("architecture", families.ROFORMER.classes)
@pytest.mark.parametrize("width", [40, 96])
def test_every_class_in_and_out(architecture: str, width: int, tmp_path, mrpc_texts) -> None:
    folder = tmp_path / "theirs"
    reference = drawn(folder, architecture, "roformer", embedding_size=width)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')  # its own takes rjieba
    positions = getattr(reference, "roformer", reference).encoder.embed_positions
    positions.weight.data = positions.create_weight()  # no parameters, though they were drawn as such
    reference.save_pretrained(folder)
    model = bert.load(folder)
    assert (model.architecture, model.config.position_embedding_type) == (architecture, "rotary")
    batches = [inputs(architecture, padded) for padded in (False, True)]
    batches += [real_inputs(folder, model, texts, architecture) for texts in mrpc_texts]
    for batch in batches:
        assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    assert_export(model, reference, AUTO[architecture], tmp_path / "ours")
