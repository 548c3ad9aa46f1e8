"""What custom tasks share: their files and the columns in them are named in the configuration."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert.config import TaskDataConfig
from bert.data.records import Records
from bert.errors import LOGGER, UserError
from bert.tasks.base import Task
from bert.tasks.readers.columns import split_names, split_records
from bert.tasks.readers.rows import table_files


@dataclass(frozen=True, kw_only=True)
class ColumnFilesTask(Task):
    """A task whose splits are files of columns; one that overrides `splits` and `records` reads any layout."""

    data: TaskDataConfig = field(default_factory=TaskDataConfig)

    def splits(self, folder: Path) -> list[str]:
        return split_names(Path(folder), self.data)

    def records(self, folder: Path, split: str) -> Records:
        """The rows of a split, under the names that the columns have."""
        return split_records(Path(folder), split, self.data)

    @property
    def id_columns(self) -> tuple[str, ...]:
        return () if self.data.columns.id is None else (self.data.columns.id,)

    @property
    def unnamed_table_columns(self) -> tuple[str, ...]:
        return tuple(self.data.column_names or ())


def labelled_examples(task: ColumnFilesTask, data: Any) -> Any:
    """The task's examples of a labelled file, or of rows in memory as `json_lines` reads them. Raises UserError."""
    if "dev" not in task.data_keys:
        raise UserError(f"{task.name} reads its own rows, whose scores are in results.json: use a run on files")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.jsonl"
        if isinstance(data, str | os.PathLike):
            file = Path(os.path.abspath(data))
            if not file.is_file():
                raise UserError(f"{data} is no file: pass the path of a labelled file, or a list of labelled rows")
        else:
            for name, content in table_files(data, "data").items():
                (Path(folder) / name).write_text(content, encoding="utf-8")
        columns = dataclasses.replace(task.data.columns, id=None)  # scores need none
        data_config = dataclasses.replace(task.data, dev=str(file), source=None, target=None, columns=columns)
        try:
            examples = dataclasses.replace(task, data=data_config).read(Path(folder), "dev")
        except UserError as error:
            of_rows = f"{Path(folder) / 'data.jsonl'}, line "
            message = str(error).replace(of_rows, "data, row ").replace(" lines have such", " rows have such")
            raise UserError(message) from None
        for note in examples.notes:
            in_memory = str(Path(folder) / "data.jsonl")
            LOGGER.warning(note.replace(in_memory, "data").replace("(line ", "(row ") if in_memory in note else note)
        return examples
