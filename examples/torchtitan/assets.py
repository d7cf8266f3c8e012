"""Text and a tokenizer for TorchTitan's debug model, made of what comes with Python: nothing is downloaded."""

from __future__ import annotations

import json
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["make"]

_VOCABULARY = 2000  # the debug model has room for 2048
_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"
_LEAST = 200  # characters of a document


def make(directory: Path, *, most_documents: int = 400) -> None:
    """`directory`/tokenizer and `directory`/text, unless they are there already. The same for the same Python."""
    if (directory / "tokenizer" / "tokenizer_config.json").exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    for name in ("tokenizer", "text"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    documents = [text for text, _ in zip(_documents(), range(most_documents), strict=False)]
    with open(directory / "text" / "data.json", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    wanted = trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=[_BEGIN, _END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, wanted)
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    about = {"bos_token": _BEGIN, "eos_token": _END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(about))


def _documents() -> Iterator[str]:
    yield from (text for text in pydoc_data.topics.topics.values() if len(text) >= _LEAST)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= _LEAST:
            yield text
