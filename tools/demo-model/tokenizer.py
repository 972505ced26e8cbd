"""The byte-pair tokenizer of CLIP, for plain ASCII prompts.

It needs the merge list that CLIP is published with (a text file, or the same
file compressed with xz): one merge per line after a version line.
"""

import lzma
import re

BOS, EOS = 49406, 49407
WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[a-z]+|[0-9]|[^\sa-z0-9]+")


def byte_alphabet():
    """The characters that stand for the 256 byte values, in vocabulary order."""
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


class Tokenizer:
    def __init__(self, merges_path):
        opener = lzma.open if str(merges_path).endswith(".xz") else open
        with opener(merges_path, "rt", encoding="utf-8") as f:
            merges = [tuple(line.split()) for line in f.read().split("\n")[1:] if line.strip()]
        alphabet = byte_alphabet()
        tokens = alphabet + [c + "</w>" for c in alphabet] + ["".join(m) for m in merges]
        assert len(tokens) == BOS, len(tokens)
        self.ids = {t: i for i, t in enumerate(tokens)}
        self.ranks = {m: i for i, m in enumerate(merges)}
        self.cache = {}

    def word(self, word):
        if word not in self.cache:
            parts = list(word[:-1]) + [word[-1] + "</w>"]
            while len(parts) > 1:
                pairs = [self.ranks.get(p, 1 << 30) for p in zip(parts, parts[1:])]
                best = min(pairs)
                if best == 1 << 30:
                    break
                merged, i = [], 0
                while i < len(parts):
                    if i < len(pairs) and pairs[i] == best:
                        merged.append(parts[i] + parts[i + 1])
                        i += 2
                    else:
                        merged.append(parts[i])
                        i += 1
                parts = merged
            self.cache[word] = [self.ids[p] for p in parts]
        return self.cache[word]

    def encode(self, text):
        return [i for w in WORDS.findall(text.lower()) for i in self.word(w)]

    def padded(self, text, length=77):
        ids = [BOS] + self.encode(text)[: length - 2]
        return ids + [EOS] * (length - len(ids))
