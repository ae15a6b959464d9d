"""Tokenizers: the trained one is deterministic, a given one gives what transformers gives."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_makers import caption
from transformers import BertTokenizerFast

from launcher.data.tokenizer import encode, load_tokenizer, special_ids, train_wordpiece
from models.errors import UserError

CAPTIONS = [caption(number, which) for number in range(200) for which in range(3)] + [
    "Été à Zürich — 東京!"
] * 3


def test_training_is_deterministic_across_processes() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests'); from test_data_tokenizer import *; "
        "print(hashlib.sha256(train_wordpiece(CAPTIONS, 300).to_str().encode()).hexdigest())"
    )
    root = Path(__file__).parent.parent
    runs = {
        subprocess.run(
            [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    }
    assert runs == {hashlib.sha256(train_wordpiece(CAPTIONS, 300).to_str().encode()).hexdigest()}


def test_trained_vocabulary_is_small_contiguous_and_has_whole_words() -> None:
    tokenizer = train_wordpiece(CAPTIONS, 300)
    vocabulary = tokenizer.get_vocab()
    assert len(vocabulary) <= 300
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert {"picture", "with", "purple"} <= set(vocabulary)
    assert [vocabulary[name] for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]
    # Special tokens are never produced from letters, and letters are not special.
    assert tokenizer.encode("picture 7", add_special_tokens=False).tokens == ["picture", "7"]
    assert tokenizer.decode(tokenizer.encode("purple").ids) == "purple"


def test_trained_tokenizer_agrees_with_transformers_bert(tmp_path: Path) -> None:
    trained = train_wordpiece(CAPTIONS, 300)
    words = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    reference = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))
    special = special_ids(trained)
    for text in [*CAPTIONS[::37], "A PICTURE, of Zurich", "unseen wörds 12345"]:
        expected = reference(text, max_length=12, truncation=True)["input_ids"]
        ids, _ = encode(trained, [text], special=special, max_length=12)[0]
        assert ids.tolist() == expected


def test_forms_of_a_given_tokenizer(tmp_path: Path) -> None:
    trained = train_wordpiece(CAPTIONS, 300)
    trained.save(str(tmp_path / "tokenizer.json"))
    words = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    for path in (tmp_path, tmp_path / "tokenizer.json", tmp_path / "vocab.txt"):
        loaded = load_tokenizer(path)
        assert loaded.encode("the purple picture").ids == trained.encode("the purple picture").ids


def test_cls_and_sep_survive_truncation() -> None:
    tokenizer = train_wordpiece(CAPTIONS, 300)
    special = special_ids(tokenizer)
    ids, length = encode(tokenizer, ["purple " * 3000], special=special, max_length=16)[0]
    assert (ids[0], ids[-1], len(ids), length) == (special["cls"], special["sep"], 16, 3002)
    assert ids.dtype == np.int32
    ids, length = encode(tokenizer, ["purple"], special=special, max_length=16)[0]
    assert (ids[0], ids[-1], len(ids), length) == (special["cls"], special["sep"], 3, 3)


def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match=r"--tokenizer .*broken\.json"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(UserError, match="--tokenizer"):
        load_tokenizer(tmp_path / "missing-folder")


def test_a_vocabulary_without_mask_is_refused() -> None:
    from tokenizers import Tokenizer, models

    bare = Tokenizer(models.WordPiece({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}, unk_token="[UNK]"))
    with pytest.raises(UserError, match=r"no mask token \(\[MASK\] or <mask>\)"):
        special_ids(bare)
