from __future__ import annotations

import json
import random
import shutil
import time

import pytest
import torch
from tokenizers import Tokenizer as Backend

from clap_zero.data.captions import caption_id, read_captions
from clap_zero.data.members import BadSampleError
from clap_zero.data.text import EMBEDDED_TOKENIZER, PAD_ID, Tokenizer
from clap_zero.errors import DataError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


def varied_texts() -> list[str]:
    texts = [
        "a dog barks", " a dog", "", " ", "a  b\n\nc\t d ", "naïve 音楽 🎵👩‍👩‍👧", "<mask> x <s> </s> <pad>",
        "a <mask>b",
        "it's DON'T 1234 $%", "\u200b\ufeffx", "word " * 600, "x" * 3000, "'s 'll I'm", "\u0301e\u0301 é",
    ]  # fmt: skip
    rng = random.Random(0)
    pools = [(32, 127), (32, 127), (0x20, 0x2FFF), (0x1F300, 0x1F6FF)]
    for _ in range(300):
        characters = [
            chr(rng.randrange(*rng.choice(pools))) if rng.random() > 0.2 else " " for _ in range(rng.randrange(40))
        ]
        texts.append("".join(characters))
    return texts


def test_same_ids_as_transformers(tokenizer):
    from transformers import RobertaTokenizer

    theirs = RobertaTokenizer.from_pretrained(str(EMBEDDED_TOKENIZER))
    assert len(tokenizer) == len(theirs) == 50265
    for text in varied_texts():
        for limit in (8, 77, 512):
            assert tokenizer.encode(text, limit) == theirs(text, truncation=True, max_length=limit)["input_ids"], text


def test_same_ids_from_a_saved_directory(tokenizer, tmp_path):
    from transformers import RobertaTokenizer

    RobertaTokenizer.from_pretrained(str(EMBEDDED_TOKENIZER)).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    saved = Tokenizer(tmp_path)
    for text in varied_texts()[:100]:
        assert saved.encode(text, 77) == tokenizer.encode(text, 77)


@pytest.mark.parametrize("num_words", [1, 508, 509, 510, 511, 512, 513, 5000])
def test_never_more_than_the_limits(tokenizer, num_words):
    text = "a" + " a" * (num_words - 1)  # one token a word
    assert len(tokenizer.encode(text, 10_000)) == min(num_words + 2, 512)
    ids = tokenizer.encode(text, 77)
    assert len(ids) == min(num_words + 2, 77) and ids[0] == 0 and ids[-1] == 2


def test_cut_captions_are_counted(tokenizer):
    before = tokenizer.num_truncated
    tokenizer(["one", "word " * 20], 10)
    assert tokenizer.num_truncated == before + 1


def test_padding(tokenizer):
    ids, mask = tokenizer(["a dog", "a"], 77)
    assert ids.dtype == mask.dtype == torch.int64 and ids.shape == mask.shape == (2, 4)
    assert ids[1, 3] == PAD_ID and mask.sum(1).tolist() == [4, 3]


def test_missing_and_foreign_tokenizers_are_named(tmp_path):
    with pytest.raises(DataError, match="holds no tokenizer"):
        Tokenizer(tmp_path)
    shutil.copy(EMBEDDED_TOKENIZER / "merges.txt", tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("record", "captions"),
    [({"text": ["a", "b"]}, ["a", "b"]), ({"text": " x "}, ["x"]), ({"text": ["", 5, None, "c"]}, ["c"])],
)
def test_lists_and_strings(record, captions):
    assert read_captions({".json": json.dumps(record).encode()}) == captions


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"caption": "x"}', "has no 'text'"), (b'{"text": []}', "is empty"), (b'{"text": null}', "null"),
        (b'{"text": "  "}', "is empty"), (b'{"text": 5}', "int"), (b'{"text": [5]}', "holds no text"),
        (b'{"text"', "broken json"), (b"\xff\xfe", "broken json"), (b"[]", "not an object"), (b"", "broken json"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_has_a_reason(data, reason):
    with pytest.raises(BadSampleError, match=reason):
        read_captions({".json": data})


def test_the_key_can_be_chosen():
    assert read_captions({".json": b'{"caption": "x"}'}, "caption") == ["x"]


def test_txt_counts_where_json_has_nothing():
    assert read_captions({".txt": "\ufeffein Hund\n".encode()}) == ["ein Hund"]
    assert read_captions({".json": b'{"tag": []}', ".txt": b"x"}) == ["x"]
    with pytest.raises(BadSampleError, match="is empty"):
        read_captions({".txt": b" \n"})


def test_half_of_a_surrogate_pair_does_not_break_the_tokenizer(tokenizer):
    (caption,) = read_captions({".json": b'{"text": "a \\ud800 b"}'})
    assert tokenizer.encode(caption, 77)


def test_caption_ids_are_equal_for_equal_captions_only():
    assert caption_id("a dog") == caption_id("a dog") != caption_id("a cat")
    assert 0 <= caption_id("x") < 2**63


def test_only_the_beginning_of_a_very_long_text_is_looked_at(tokenizer):
    whole = EMBEDDED_TOKENIZER / "tokenizer.json"
    backend = Backend.from_file(str(whole)) if whole.is_file() else Tokenizer()._backend
    backend.no_truncation()
    rng = random.Random(1)
    words = ["dog", " barks", "  loudly", "\n", " 12", "<mask>", " naïve", " 音楽", "-" * 70, "!?", " it's", "   "]
    texts = ["".join(rng.choices(words, k=12_000)), "ÃÂ" * 40_000, "dog" + " -" + "-" * 90_000, "=" * 40_000]
    for text in texts:
        assert len(text) > 16_384
        for limit in (77, 512):
            before = tokenizer.num_truncated
            ids = backend.encode(text).ids
            assert tokenizer.encode(text, limit) == [*ids[: limit - 1], ids[-1]], text[:40]
            assert tokenizer.num_truncated == before + 1
    begun_s = time.process_time()
    for text in ("x" * 4_000_000, "dog barks " * 400_000, "a" + " " * 4_000_000 + "b"):
        assert len(tokenizer.encode(text, 512)) == 512
    assert time.process_time() - begun_s < 2
