"""Captions to RoBERTa token ids, without transformers: loader workers have to start fast."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import Tensor

from clap_zero.errors import DataError

EMBEDDED_TOKENIZER = Path(__file__).resolve().parents[1] / "assets" / "roberta"
MAX_TOKENS = 512
"""Positions that RoBERTa's table of 514 can use, `<s>` and `</s>` included."""
PAD_ID = 1
_FIRST_CHARACTERS, _MOST_CHARACTERS = 16_384, 65_536
"""Characters of a caption that are looked at, and where these have too few tokens (a token of RoBERTa has up to 128
bytes). A text of megabytes would take minutes and gigabytes, for ids of which all but the first 512 are dropped."""
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


class Tokenizer:
    """Same ids as `RobertaTokenizer.from_pretrained(path)`.

    Args:
        path: directory with tokenizer.json, or with vocab.json and merges.txt; None: the embedded vocabulary.

    Raises:
        DataError: the files are missing or broken.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else EMBEDDED_TOKENIZER
        self._backend = _load(self.path)
        self._max_tokens = 0
        self.num_truncated = 0

    def __len__(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Ids of one caption with `<s>` and `</s>`, at most `max_tokens` and 512; `num_truncated` counts the cut ones.

        Of a very long text only the beginning is looked at, up to a space: words before it have the same tokens.

        Args:
            text: the caption.
            max_tokens: longest result, at least 2.
        """
        limit = min(max_tokens, MAX_TOKENS)
        assert limit >= 2, limit
        if limit != self._max_tokens:
            self._backend.enable_truncation(max_length=limit)
            self._max_tokens = limit
        for most in (_FIRST_CHARACTERS, _MOST_CHARACTERS):
            head = _beginning(text, most)
            encoding = self._backend.encode(head)
            if encoding.overflowing or len(head) == len(text):
                break
        self.num_truncated += bool(encoding.overflowing) or len(head) < len(text)
        return encoding.ids

    def __call__(self, texts: Sequence[str], max_tokens: int) -> tuple[Tensor, Tensor]:
        """Ids and mask of several captions.

        Args:
            texts: n captions, at least one.
            max_tokens: longest result, special tokens included.

        Returns:
            input_ids and attention_mask, int64 (n, L); L is the length of the longest, the rest is padded with 1.
        """
        return pad_ids([self.encode(text, max_tokens) for text in texts])


def pad_ids(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pads rows of ids on the right to the longest.

    Returns:
        input_ids and attention_mask, int64 (n, L).
    """
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), PAD_ID, dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        mask[number, : len(row)] = 1
    return ids, mask


def _beginning(text: str, most: int) -> str:
    """At most `most` characters of a text: whole words, where the second half of them has a space."""
    if len(text) <= most:
        return text
    end = text.rfind(" ", most // 2, most)
    words = text[:end].rstrip() if end >= 0 else ""
    return words if len(words) >= most // 2 else text[:most]


def _load(path: Path) -> Backend:
    whole, vocab, merges = path / "tokenizer.json", path / "vocab.json", path / "merges.txt"
    if not whole.is_file() and not (vocab.is_file() and merges.is_file()):
        raise DataError(f"{path} holds no tokenizer: it needs tokenizer.json, or vocab.json and merges.txt")
    try:
        # The library raises plain Exception for whatever it dislikes in a file.
        backend = Backend.from_file(str(whole)) if whole.is_file() else _from_vocabulary(vocab, merges)
    except Exception as error:
        raise DataError(f"the tokenizer in {path} cannot be read: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    if backend.token_to_id("<pad>") != PAD_ID:
        raise DataError(f"the tokenizer in {path} is not RoBERTa's: <pad> must be token {PAD_ID}")
    return backend


def _from_vocabulary(vocab: Path, merges: Path) -> Backend:
    """The byte-level BPE of RoBERTa, put together as transformers does (models/roberta/tokenization_roberta.py)."""
    ids = json.loads(vocab.read_text("utf-8"))
    backend = Backend(
        models.BPE.from_file(str(vocab), str(merges), continuing_subword_prefix="", end_of_word_suffix="")
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), trim_offsets=True, add_prefix_space=False
    )
    return backend
