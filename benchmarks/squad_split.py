"""Makes a training and a dev file from whole SQuAD articles. The last articles of a file are used for dev.

python benchmarks/squad_split.py OUT --train train-v1.1.head.json --split dev-v1.1.json --dev_articles 10
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for train.json and dev.json")
    parser.add_argument("--train", type=Path, required=True, help="file whose articles are all for training")
    parser.add_argument("--split", type=Path, required=True, help="file whose last articles are for dev")
    parser.add_argument("--dev_articles", type=int, default=10)
    arguments = parser.parse_args()
    train, split = (json.loads(path.read_text(encoding="utf-8"))["data"] for path in (arguments.train, arguments.split))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, articles in (
        ("train", train + split[: -arguments.dev_articles]),
        ("dev", split[-arguments.dev_articles :]),
    ):
        questions = sum(len(paragraph["qas"]) for article in articles for paragraph in article["paragraphs"])
        print(f"{name}.json: {len(articles)} articles, {questions:,} questions")
        content = json.dumps({"version": "1.1", "data": articles}, ensure_ascii=False)
        (arguments.out / f"{name}.json").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
