"""GLUE (Wang et al. 2019): the table of its nine tasks; the diagnostic set is a split of MNLI's."""

from __future__ import annotations

from bert.tasks.sequence import ClassificationTask, RegressionTask

ENTAILMENT = ("entailment", "not_entailment")

TASKS = (
    ClassificationTask(
        name="sst2",
        folder_name="SST-2",
        text_columns=("sentence",),
        label_column="label",
        labels=("0", "1"),
        label_names=("negative", "positive"),
        metrics=("accuracy",),
        main_metric="accuracy",
        submissions={"test": "SST-2.tsv"},
    ),
    ClassificationTask(
        name="mrpc",
        folder_name="MRPC",
        text_columns=("#1 String", "#2 String"),
        hub_columns=("sentence1", "sentence2"),
        label_column="Quality",
        labels=("0", "1"),
        label_names=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
        main_metric="f1",
        submissions={"test": "MRPC.tsv"},
    ),
    ClassificationTask(
        name="cola",
        folder_name="CoLA",
        text_columns=("sentence",),
        label_column="label",
        labels=("0", "1"),
        label_names=("unacceptable", "acceptable"),
        metrics=("matthews", "accuracy"),
        main_metric="matthews",
        submissions={"test": "CoLA.tsv"},
        unnamed_columns=("source", "label", "mark", "sentence"),
    ),
    RegressionTask(
        name="stsb",
        folder_name="STS-B",
        text_columns=("sentence1", "sentence2"),
        label_column="score",
        lowest=0.0,
        highest=5.0,
        metrics=("pearson", "spearman"),
        main_metric="pearson",
        submissions={"test": "STS-B.tsv"},
    ),
    ClassificationTask(
        name="qqp",
        folder_name="QQP",
        text_columns=("question1", "question2"),
        label_column="is_duplicate",
        labels=("0", "1"),
        label_names=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
        main_metric="f1",
        submissions={"test": "QQP.tsv"},
        id_column="id",
        skips_short_rows=True,
        may_be_empty=True,  # question2 of two training rows
    ),
    ClassificationTask(
        name="mnli",
        folder_name="MNLI",
        text_columns=("sentence1", "sentence2"),
        hub_columns=("premise", "hypothesis"),
        label_column="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        label_names=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
        main_metric="accuracy",
        files={
            "train": ("train.tsv",),
            "dev": ("dev_matched.tsv",),
            "dev_mismatched": ("dev_mismatched.tsv",),
            "test": ("test_matched.tsv",),
            "test_mismatched": ("test_mismatched.tsv",),
            # Beside MNLI's folder in GLUE's archive, under two names in its history.
            "diagnostic": ("AX.tsv", "diagnostic.tsv", "../AX/AX.tsv", "../diagnostic/diagnostic.tsv",
                           "AX/AX.tsv", "diagnostic/diagnostic.tsv"),
        },
        submissions={"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv", "diagnostic": "AX.tsv"},
    ),
    ClassificationTask(
        name="qnli",
        folder_name="QNLI",
        text_columns=("question", "sentence"),
        label_column="label",
        labels=ENTAILMENT,
        label_names=ENTAILMENT,
        metrics=("accuracy",),
        main_metric="accuracy",
        submissions={"test": "QNLI.tsv"},
    ),
    ClassificationTask(
        name="rte",
        folder_name="RTE",
        text_columns=("sentence1", "sentence2"),
        label_column="label",
        labels=ENTAILMENT,
        label_names=ENTAILMENT,
        metrics=("accuracy",),
        main_metric="accuracy",
        submissions={"test": "RTE.tsv"},
    ),
    ClassificationTask(
        name="wnli",
        folder_name="WNLI",
        text_columns=("sentence1", "sentence2"),
        label_column="label",
        labels=("0", "1"),
        label_names=ENTAILMENT[::-1],
        metrics=("accuracy",),
        main_metric="accuracy",
        submissions={"test": "WNLI.tsv"},
    ),
)  # fmt: skip

SUBMISSIONS = tuple(name for task in TASKS for name in task.submissions.values())
"""The files that a submission to gluebenchmark.com is made of."""
