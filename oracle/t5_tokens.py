"""Token ids of T5's tokenizer for texts that stress its normaliser and its Unigram search.

Reference: Hugging Face `tokenizers` with the published tokenizer.json of T5 (v1.1, Unigram, 32,100 entries): the Precompiled character map
(NMT's NFKC), runs of spaces to one, Metaspace with a leading space, Viterbi. Ids come without the end token and without padding.
"""

import random

import clip_tokens
import fixture
import vocab

WORDS = """
a the an of in on with and photo painting portrait cat dog astronaut horse mars castle forest river sunset neon city rain lights oil watercolor
masterpiece ultra-detailed cinematic bokeh 8k 4K 35mm f/1.8 highly intricate woman man child robot dragon spaceship Tokyo Paris München São
supercalifragilisticexpialidocious photorealistic antidisestablishmentarianism steampunk cyberpunk art-nouveau sign reading says letters text
"OPEN" 'hello' (red) [blue] {x} <b> #1 50% $9.99 @home it's don't we'll 3.14 1,000 2026-11-30 über café naïve Straße façade Zürich señor
Bild einer Katze un chat noir sur le toit eine alte Frau pictură românească ţară șapte traduire übersetzen
""".split()
ALIEN = [
    "猫", "日本", "한국", "привет", "мир", "Γειά", "שלום", "مرحبا", "नमस्ते", "ไทย", "🙂", "👩🏾‍🚀", "🇩🇪", "❤️", "★", "→", "∑", "½", "²", "①", "㍿", "ﬁ", "Ａ１", "ｶﾞ", "…", "—", "“q”", "«q»", "™", "\u0301", "e\u0301", "\u200b", "\u200d",
    "\ufeff", "\u00a0", "\u3000", "\u2028", "\u00ad", "\x00", "\x07", "\x1b", "\x7f", "\x85", "\x9f", "\ufffd", "\ue000", "\U0010ffff", "\uffff", "\u202e", "\ufe0f", "\u2581", "\u2581\u2581", "ſ", "İ", "ß", "Ω", "\u1112\u1161\u11ab", "𝐁", "ᏣᎳᎩ", "ﷺ",
]
SPACES = [" "] * 12 + ["  ", "   ", "\t", "\n", "\r\n", " \n ", "\u00a0", "\u2003", "\u3000", "", "-", ", ", ". ", "/", "_"]
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
# The reference takes added tokens out of the text before it normalises anything.
SPECIAL = [
    "<extra_id_0>", "<extra_id_99>", "<extra_id_100>", "a<extra_id_0>b", "a <extra_id_0> b", "  <extra_id_1>  ", "<extra_id_0><extra_id_1>", "The <extra_id_0> walks in <extra_id_1> park", "</s>", "a</s>", "</s>a", "a </s> b", "<pad>", "<pad> <pad>", "<unk>", "a<unk>b",
    "<EXTRA_ID_0>", "<extra_id_0", "< extra_id_0 >", "＜extra_id_0＞", "<s>", "猫<extra_id_5>猫",
]


def generated(count, seed=2024):
    """Sentences, glued words, made-up words, stretches of odd characters. Strings are made of code points only, so any language can hold them."""
    rng = random.Random(seed)
    texts = []
    while len(texts) < count:
        kind = rng.randrange(8)
        if kind <= 2:
            pool = WORDS
            n = rng.randint(1, 7)
        elif kind <= 4:
            pool = WORDS + ALIEN
            n = rng.randint(1, 5)
        elif kind == 5:
            pool = ALIEN
            n = rng.randint(1, 3)
        elif kind == 6:
            pool = ["".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 14))).title() if rng.random() < 0.3 else "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 14))) for _ in range(3)]
            n = rng.randint(1, 3)
        else:
            pool = [chr(rng.choice([rng.randint(0x20, 0x7E), rng.randint(0xA0, 0x24F), rng.randint(0x2000, 0x206F), rng.randint(0x20A0, 0x2BFF), rng.randint(0x3000, 0x33FF), rng.randint(0xF900, 0xFAFF), rng.randint(0xFE00, 0xFFEF), rng.randint(0x370, 0x1FFF)])) for _ in range(6)]
            n = rng.randint(1, 6)
        text = rng.choice(pool)
        for _ in range(n - 1):
            text += rng.choice(SPACES) + rng.choice(pool)
        if rng.random() < 0.1:
            text = rng.choice([" ", "  ", "\t", "\n"]) + text
        if rng.random() < 0.1:
            text += rng.choice([" ", "   ", "\n"])
        texts.append(text)
    return texts


def main():
    tokenizer = vocab.t5_tokenizer()

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    handmade = clip_tokens.PLAIN + clip_tokens.CONTRACTIONS + clip_tokens.PUNCTUATION + clip_tokens.DIGITS + clip_tokens.LATIN + clip_tokens.SCRIPTS + clip_tokens.EMOJI + clip_tokens.CONTROL + clip_tokens.MIXED
    more = ["x" * 500, "ab" * 300, "the " * 150, "antidisestablishmentarianism" * 8, "\u2581", "\u2581a", "a\u2581b", " \u2581 ", "\u2581\u2581\u2581", "a  b   c    d", "猫 犬", "<", ">", "a<b>c", "\u0300", "\u1100\u1161", "\x01\x02\x03", "\x7f", "a\x00"]
    texts = list(dict.fromkeys(handmade + more + generated(2000)))
    texts = [text for text in texts if not any(token in text for token in ("<pad>", "</s>", "<unk>"))]
    assert len(texts) >= 2000
    assert ids("translate English to German: The house is wonderful.") == [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5]
    fixture.save_json("t5_tokens", {
        "source": f"tokenizers {fixture.version('tokenizers')}, tokenizer.json of T5 v1.1",
        "script": "oracle/t5_tokens.py", "pad": 0, "eos": 1, "unk": 2, "vocab_size": tokenizer.get_vocab_size(),
        "cases": [[text, ids(text)] for text in texts],
        "special": [[text, ids(text)] for text in SPECIAL],
    })


if __name__ == "__main__":
    main()
