"""CLIP's tokenizer from its published merge list, T5's from its published tokenizer.json."""

import gzip
import lzma
import os
import pathlib

from tokenizers import Tokenizer
from transformers import CLIPTokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent


def merges_file():
    """`CLIP_MERGES`, or the list that the workspace carries."""
    if "CLIP_MERGES" in os.environ:
        return pathlib.Path(os.environ["CLIP_MERGES"])
    found = sorted(ROOT.glob("crates/**/clip_merges.txt*"))
    if not found:
        raise SystemExit("set CLIP_MERGES to OpenAI's BPE merge list for CLIP (48894 merges, plain, .gz or .xz)")
    return found[0]


def t5_file():
    """`T5_TOKENIZER`, or the file that the workspace carries."""
    if "T5_TOKENIZER" in os.environ:
        return pathlib.Path(os.environ["T5_TOKENIZER"])
    found = sorted(ROOT.glob("crates/**/t5*.json*"))
    if not found:
        raise SystemExit("set T5_TOKENIZER to T5's tokenizer.json (Unigram, 32100 entries; plain, .gz or .xz)")
    return found[0]


def read_text(path):
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "rt", encoding="utf-8") as file:
        return file.read()


def t5_tokenizer():
    tokenizer = Tokenizer.from_str(read_text(t5_file()))
    assert tokenizer.get_vocab_size() == 32100
    return tokenizer


def read_merges():
    text = read_text(merges_file())
    merges = [tuple(line.split()) for line in text.split("\n")[1:] if line]
    assert len(merges) == 48894, len(merges)
    return merges


def byte_symbols():
    """The printable stand-in for each byte, in vocabulary order: printable bytes first, then the rest as U+0100 onward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def clip_tokenizer():
    merges, symbols = read_merges(), byte_symbols()
    words = symbols + [s + "</w>" for s in symbols] + ["".join(pair) for pair in merges] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {word: i for i, word in enumerate(words)}
    assert len(vocab) == 49408
    return CLIPTokenizer(vocab=vocab, merges=merges)


def ids(tokenizer, text):
    """Token ids of `text` alone: no start, no end, no truncation."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
