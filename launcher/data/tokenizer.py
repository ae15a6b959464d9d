"""The tokenizer of a store: one that is given, or a WordPiece trained on the captions."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from models.errors import UserError

SPECIAL = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Role → its token in BERT's and in RoBERTa's vocabularies."""

MAX_TRAINING_CAPTIONS = 2_000_000
MAX_ALPHABET = 1_000


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load ``tokenizer.json``, a vocab.txt, a model folder, or a Hugging Face id. Raises UserError."""
    file = Path(path)
    if file.is_dir() and (file / "tokenizer.json").is_file():
        file = file / "tokenizer.json"
    try:
        if file.suffix == ".json" and file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
        elif file.suffix == ".txt" and file.is_file():
            tokenizer = wordpiece(models.WordPiece.read_file(str(file)))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(path)).backend_tokenizer
    except Exception as error:  # tokenizers raises bare Exception, transformers OSError, ValueError, …
        reason = str(error).strip().splitlines()
        raise UserError(f"--tokenizer {path}: {reason[0] if reason else type(error).__name__}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Give the ids of pad, unk, cls, sep and mask. Raises UserError if the vocabulary lacks one."""
    ids = {}
    for role, names in SPECIAL.items():
        found = [number for name in names if (number := tokenizer.token_to_id(name)) is not None]
        if not found:
            raise UserError(
                f"the tokenizer has no {role} token ({' or '.join(names)}); give another --tokenizer"
            )
        ids[role] = found[0]
    return ids


def wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    """Build BERT's uncased tokenizer over a vocabulary (token → id)."""
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([names[0] for names in SPECIAL.values()])
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    return tokenizer


def train_wordpiece(captions: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a WordPiece of at most ``vocab_size`` tokens; the same captions give the same bytes.

    The library's trainer numbers the one-letter continuations (``##a``) in the order of a randomly seeded
    hash map, and breaks ties between equally frequent pairs by number: two runs differ. Handing it the
    letters and their continuations as "special tokens" fixes their numbers; only the vocabulary is kept.
    """
    specials = [names[0] for names in SPECIAL.values()]
    blank = wordpiece({name: number for number, name in enumerate(specials)})
    words: Counter[str] = Counter()
    iterator = iter(captions)
    for caption in islice(iterator, MAX_TRAINING_CAPTIONS):
        text = blank.normalizer.normalize_str(caption)
        words.update(word for word, _ in blank.pre_tokenizer.pre_tokenize_str(text) if len(word) <= 100)
    letters: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            letters[letter] += count
    room = max(1, min(MAX_ALPHABET, (vocab_size - len(specials)) // 3))
    alphabet = sorted(sorted(letters, key=lambda letter: (-letters[letter], letter))[:room])

    seeded = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    seeded.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    seeded.train_from_iterator(
        _repeated(words),
        trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=specials + alphabet + [f"##{letter}" for letter in alphabet],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
    return wordpiece(seeded.get_vocab(with_added_tokens=True))


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Say each word as often as it was counted, in lines of at most 1,000 words."""
    for word in sorted(words):
        whole, rest = divmod(words[word], 1_000)
        yield from [" ".join([word] * 1_000)] * whole
        yield " ".join([word] * rest)


def encode(
    tokenizer: Tokenizer, captions: list[str], *, special: dict[str, int], max_length: int
) -> list[tuple[np.ndarray, int]]:
    """Give, for each caption, int32 ids ``[CLS] … [SEP]`` of at most ``max_length``, and the uncut length."""
    encoded = []
    for encoding in tokenizer.encode_batch(captions, add_special_tokens=False):
        ids = encoding.ids
        cut = [special["cls"], *ids[: max_length - 2], special["sep"]]
        encoded.append((np.array(cut, dtype=np.int32), len(ids) + 2))
    return encoded
