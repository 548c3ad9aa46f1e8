"""`bert plan`: sizes, the suggestion, and what happens where memory runs out."""

from types import SimpleNamespace

import pytest

import bert
from bert.analysis.memory import BatchFit, StepMemory
from bert.commands.cli.arguments import run_command
from bert.commands.finetune import main as finetune
from bert.commands.plan import CompilationProgress, main, parse_size, suggestion
from bert.commands.plan import main as plan
from bert.commands.pretrain import main as pretrain
from bert.training.loop import count_parameters
from tests.conftest import SMALL_MODEL
from tests.messages import has_all

ARGUMENTS = [
    *SMALL_MODEL,
    "--model.vocab_size=64",
    "--data.sequence_length=16",
    "--data.max_predictions_per_sequence=4",
]


class Grid:
    shape = (8, 1, 1)
    mesh = type("Mesh", (), {"size": 8})


def fit(remat: str, rows: int) -> BatchFit:
    return BatchFit(remat, rows, 32 // max(rows, 1), StepMemory(0, 0))


def test_the_least_recomputation_with_enough_rows_is_suggested() -> None:
    def said(*rows: int) -> str:
        return suggestion([fit(remat, n) for remat, n in zip(("none", "dots", "full"), rows, strict=True)], Grid)

    assert said(8, 16, 32).endswith("--training.gradient_accumulation_steps 4 --training.remat none")
    assert said(4, 16, 32).endswith("--training.gradient_accumulation_steps 2 --training.remat dots")
    assert said(0, 0, 2).endswith("--training.gradient_accumulation_steps 16 --training.remat full")
    assert "--training.mesh 1x8x1" in said(0, 0, 0)


@pytest.mark.slow
def test_each_phase_has_a_plan_of_its_own_and_packed_rows_one_as_well(capsys) -> None:
    phases = [
        "--phases.1.share=0.9",
        "--phases.1.sequence_length=8",
        "--phases.1.batch_size=32",
        "--phases.2.batch_size=16",
    ]
    packed = ["--data.input_format=nsp", "--data.packing=true", "--training.steps=1000"]
    assert main([*ARGUMENTS, *phases, *packed, "--memory=1GiB"]) == 0
    out = capsys.readouterr().out
    assert "phase 1: batches of 32 x 8 tokens" in out
    assert "phase 2: batches of 16 x 16 tokens" in out
    assert "suggested: --phases.1.gradient_accumulation_steps 1 --training.remat none" in out
    assert "suggested: --phases.2.gradient_accumulation_steps 1 --training.remat none" in out


def test_a_compilation_is_announced_with_the_seconds_of_the_last(capsys, monkeypatch) -> None:
    clock = SimpleNamespace(monotonic=iter([10.0, 52.4, 60.0]).__next__)
    monkeypatch.setattr("bert.commands.plan.time", clock)
    progress = CompilationProgress()
    for line in ("one", "two", "three"):
        progress(line)
    assert capsys.readouterr().err.splitlines() == ["one", "two; the last took 42 s", "three; the last took 8 s"]


def test_sizes() -> None:
    assert parse_size("16GiB") == 16 * 2**30
    assert parse_size("80GB") == 80 * 10**9
    assert parse_size("1.5MiB") == 3 * 2**19


def test_mistakes_are_sentences(fails) -> None:
    assert "--memory 16 apples is not a size" in fails(main, "--memory=16 apples")
    assert has_all(fails(main, "--memory=16"), "--memory 16 is not a size", "16GiB")
    assert "--memory needs a value" in fails(main, "--memory")
    assert has_all(fails(main, *ARGUMENTS), "does not report", "--memory")


@pytest.mark.slow
def test_a_plan_fits_the_memory_and_less_memory_means_fewer_rows(capsys) -> None:
    def rows(memory: str) -> list[str]:
        arguments = [*ARGUMENTS, "--training.batch_size=64", f"--memory={memory}"]
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith("suggested:")
        return [line.split() for line in lines if line.endswith("a device")]

    ample, scarce = rows("1GiB"), rows("600KB")
    assert [line[1] for line in ample] == ["64", "64", "64"]
    assert int(scarce[0][1]) < 64


def test_memory_that_runs_out_is_advice_and_no_stack_trace(fails) -> None:
    @run_command
    def command(argv: list[str]) -> int:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.")

    error = fails(command)
    assert error.startswith("error: the memory of a device is used up")
    assert "for pretraining, bert plan" in error

    @run_command
    def other(argv: list[str]) -> int:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        other([])


@pytest.mark.medium
def test_absent_devices_get_exact_state_and_a_rough_formula(capsys) -> None:
    arguments = [*ARGUMENTS, "--training.batch_size=64", "--device=h100:8", "--training.mesh=2x2x2"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 x h100, mesh data 2 x fsdp 2 x tensor 2; float32")
    assert [line.endswith("a device (exact)") for line in lines[1:3]] == [True, True]
    assert lines[3].startswith("  gradients")
    assert lines[4] == "batches of 64 x 16 tokens"
    assert [line.endswith("(rough)") for line in lines[5:7]] == [True, True]
    assert "without the communication of the axes fsdp and tensor" in lines[7]
    assert "arXiv 2205.05198" in lines[-1]
    assert main([*arguments, "--memory=1MiB"]) == 0
    fits = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" rows fit")]
    assert len(fits) == 2
    assert "; about 0 rows fit" not in fits[1]


@pytest.mark.medium
def test_a_pod_on_paper_shows_its_arithmetic(capsys) -> None:
    base = ["--config=base", "--model.num_hidden_layers=1"]  # 11 layers of 7,087,872 parameters fewer
    assert main([*base, "--device=v5e:64", "--utilization=0.5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("64 x v5e on 16 hosts, mesh data 64 x fsdp 1 x tensor 1; bfloat16")
    assert "0.12 GiB  a device, as the parameters; 0.48 GiB in all" in out
    assert "with 4 bytes for each of 32,139,836 gradients, of one micro-batch:" in out
    assert "0.338 ms = 32,768 tokens x 65.1 MFLOP / (64 x 197 TFLOP/s x 0.5)" in out
    assert out.count("1.266 ms = 2 x 63/64 x 128.6 MB = 253.1 MB at 200 GB/s") == 2
    assert "1.604 ms, 78.9% of it all-reduce" in out
    assert "  900,000 steps             0.4 h" in out
    assert main([*base, "--device=h100:16"]) == 0
    assert capsys.readouterr().out.count("2 x 1/2 x 16.1 MB = 16.1 MB at 50 GB/s") == 2


@pytest.mark.medium
def test_a_plan_of_modern_base_describes_its_three_stages(capsys) -> None:
    """Rows, tokens and settings of each stage (Warner et al. 2024, section 2.2)."""
    assert main(["--config=modern_base", "--device=h100:8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = [number for number, line in enumerate(lines) if line.startswith("phase ")]
    assert [lines[number] for number in numbers] == [
        "phase 1: batches of 4608 x 1024 tokens up to step 374,918, 1.719e+12 tokens",
        "phase 2: batches of 576 x 8192 tokens up to step 427,888, 2.499e+11 tokens",
        "phase 3: batches of 576 x 8192 tokens up to step 438,500, 5.007e+10 tokens",
    ]
    long = "  sequence_length 8192, batch_size 576, gradient_accumulation_steps 144, learning_rate 0.0003"
    assert [lines[number + 1] for number in numbers] == [
        "  batch_size_ramp [768, 1536, 2304, 3072, 3840], ramp_share 0.0565, rotary_base 10000",
        f"{long}, weight_decay 0.0333",
        f"{long}, schedule one_minus_sqrt, final_rate 0.001, weight_decay 0.0333",
    ]
    # The steps of the ramp count as fewer steps of whole batches.
    assert [line.split(" steps")[0].strip() for line in lines if " steps  " in line] == ["364,326", "52,970", "10,612"]


@pytest.mark.medium
def test_a_plan_has_the_sizes_of_init_and_the_tokens_of_the_vocabulary(pretrained, tmp_path, capsys, fails) -> None:
    model = bert.load(pretrained)
    gradients = f"with 4 bytes for each of {count_parameters(model.params):,} gradients"
    lengths = ["--data.input_format=nsp", "--data.sequence_length=16", "--data.max_predictions_per_sequence=4",
               "--device=h100"]  # fmt: skip
    assert main([f"--init={pretrained}", *lengths]) == 0
    assert gradients in capsys.readouterr().out
    own = [
        *SMALL_MODEL,
        "--model.position_embedding_type=learned",
        f"--tokenizer.path={pretrained}",
        "--model.pooler_act=tanh",
        *lengths,
    ]
    assert main(["--config=quickstart", *own]) == 0
    assert gradients in capsys.readouterr().out
    (tmp_path / "vocab.txt").write_text((pretrained / "vocab.txt").read_text() + "zzz\nyyy\n")
    longer = [
        f"--init={pretrained}",
        f"--tokenizer.path={tmp_path}",
        f"--model.vocab_size={model.config.vocab_size + 2}",
    ]
    assert main([*longer, *lengths]) == 0, "as config.yaml of such a run has it"
    assert f"of {count_parameters(model.params) + 2 * 16 + 2:,} gradients" in capsys.readouterr().out
    assert "data.sequence_length is 64, but model.max_position_embeddings" in fails(
        main, f"--init={pretrained}", *lengths, "--data.sequence_length=64"
    )


@pytest.mark.slow
def test_smoothed_labels_are_planned(capsys) -> None:
    arguments = [*ARGUMENTS[:-1], "--config=gpt2", "--phases=null", "--training.label_smoothing=0.1"]
    assert main([*arguments, "--training.batch_size=2", "--training.gradient_accumulation_steps=1", "--memory=1GiB",
                 "--model.embedding_size=16"]) == 0  # fmt: skip
    assert "suggested: " in capsys.readouterr().out


@pytest.mark.medium
def test_mistakes_in_a_device_are_sentences(fails) -> None:
    for text in ("h100:", "h100:0", "v5e:2x", "v5e:2x2x2x2", "8"):
        assert has_all(fails(main, f"--device={text}"), "is not KIND or KIND:COUNT", "h100:8")
    assert has_all(fails(main, "--device=v5e:512"), "v5e:512 is larger", "v5e", "most 256")
    assert "(256) is not divisible by 96 shares" in fails(
        main, "--config=base", "--device=h100:96", "--model.num_hidden_layers=1"
    )
    for share in ("0", "1.5", "a half"):
        assert has_all(fails(main, "--device=h100:8", f"--utilization={share}"), "is not a share", "0 to 1")
    mesh = [*ARGUMENTS, "--device=h100:4", "--training.mesh=2x2x2"]
    assert "training.mesh (2x2x2) needs 8 devices, but there are 4" in fails(main, *mesh)
    mesh = [*ARGUMENTS, "--device=h100", "--training.mesh=1x3x1"]
    assert "is not divisible by the 3 devices" in fails(main, *mesh)


def test_a_plan_needs_no_corpus(capsys) -> None:
    words = [word for word in ARGUMENTS if not word.startswith("--data.train=")]
    assert main(["--config=base", "--phases=null", *words, "--device=h100"]) == 0
    assert "(rough)" in capsys.readouterr().out


CONTRADICTIONS = [
    ("--training.batch_size=7 --training.gradient_accumulation_steps=2", "training.batch_size (7)"),
    ("--data.sequence_length=600", "data.sequence_length is 600"),
    ("--training.objective=rtd", "data.input_format"),
    ("--model.type_vocab_size=1", "model.type_vocab_size is 1"),
    ("--training.mesh=2x2x1 --training.batch_size=6", "training.batch_size (6)"),
    ("--training.mesh=1x1x5", "model.num_attention_heads"),
    ("--training.mesh=4x1x1 --training.eval_batch_size=6", "training.eval_batch_size (6)"),
    (
        "--model.position_embedding_type=disentangled --model.relative_attention_buckets=8 --training.dtype=bfloat16 "
        "--training.attention_implementation=cudnn --model.attention_probs_dropout_prob=0",
        "training.attention_implementation is cudnn",
    ),
    ("--optimizer.warmup_steps=1000 --training.steps=10", "optimizer.warmup_steps (1000)"),
]


@pytest.mark.parametrize(("arguments", "part"), CONTRADICTIONS)
def test_print_config_plan_and_the_start_reject_the_same_contradictions(arguments, part, fails, tmp_path):
    options = [
        "--config=base",
        "--data.input_format=nsp",
        "--phases=null",
        "--data.train=corpus.txt",
        *arguments.split(),
    ]
    for command, more in ((pretrain, ["--print_config"]), (plan, []), (pretrain, [f"--output_dir={tmp_path / 'run'}"])):
        assert part in fails(command, *options, *more)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("command", "recipe"), [(pretrain, "mini"), (pretrain, "domain"), (finetune, "tagging")])
def test_print_config_needs_no_key_that_a_run_has_to_set(command, recipe, capsys):
    with pytest.raises(SystemExit) as ended:
        command([f"--config={recipe}", "--print_config"])
    assert ended.value.code == 0 and "training:" in capsys.readouterr().out


def test_print_config_of_fine_tuning_rejects_rows_that_are_too_long_for_the_model(fails):
    arguments = ["--config=sst2", "--init=none", "--data.max_length=600", "--print_config"]
    assert "data.max_length is 600" in fails(finetune, *arguments)
