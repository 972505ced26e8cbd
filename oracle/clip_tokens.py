"""Token ids of CLIP's tokenizer for texts that stress its cleaning and splitting.

Reference: `transformers.CLIPTokenizer`. It applies NFC, replaces runs of whitespace by one space, and lowers the case of each character on
its own (no final sigma). It neither repairs mojibake nor decodes HTML entities, which OpenAI's original code does (ftfy, html.unescape).
"""

import fixture
import vocab

PLAIN = """
a photo of a cat
a photo of an astronaut riding a horse on mars
Portrait of a woman, oil painting, by Rembrandt
masterpiece, best quality, ultra-detailed, 8k uhd, dslr, soft lighting, high quality, film grain
UPPER CASE TEXT WITH NUMBERS 1234567890
CamelCaseWord and snake_case_word and kebab-case-word
supercalifragilisticexpialidocious antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis
the quick brown fox jumps over the lazy dog
trending on artstation
art by greg rutkowski and alphonse mucha
cyberpunk city at night, neon lights, rain, reflections
worst quality, low quality, jpeg artifacts, watermark, signature, bad anatomy, extra fingers
a cat
a Cat
A CAT
cat
cats
catcatcat
x
xx
xxx
xyzzy qwertyuiop asdfghjkl
zzzzzzzzzzzzzzzzzzzzzzzzzzzzzz
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
lorem ipsum dolor sit amet consectetur adipiscing elit
photorealistic photorealism hyperrealistic surrealism
bokeh depth of field f/1.8 85mm
1girl, solo, long hair, blue eyes
3d render, octane render, unreal engine 5
1920x1080 16:9 4k
v1.5 v2-1 sd_xl 1.0
3.14159 2.71828 1e10 -5 +7
100% 50/50 #1 @home $9.99
""".strip("\n").split("\n")

CONTRACTIONS = """
it's
IT'S
don't
we're
they've
I'm
he'll
she'd
'tis
rock'n'roll
o'clock
cats'
the dogs' bowls
''s
's
't
'
''
'''
can't've
y'all'd've
it’s
don’t
“quoted text”
‘single quoted’
"straight quotes"
`backticks`
""".strip("\n").split("\n")

PUNCTUATION = r"""
!
?
!!!
?!?!
...
…
.
,
, , ,
,,,,
;:;:
(a)
[b]
{c}
<d>
(((nested)))
a(b)c
a.b.c
a-b-c
a--b
a — b
a–b
a_b
__init__
a/b\c
\(escaped\)
&
&amp;
&lt;b&gt;
&quot;hi&quot; &#39;x&#39; &eacute;
<html><body>text</body></html>
http://example.com/path?query=1&other=2#frag
user@example.com
#hashtag @mention
^_^ :) ;-) :D xD <3
~!@#$%^&*()_+
|||
a|b
$$$
100€ 50£ 20¥ 10₹
© ® ™
° ± × ÷
½ ¼ ¾
² ³ ¹
№ ª º
§ ¶ † ‡
• · ∙
→ ← ↑ ↓ ⇒
∀x∈ℝ: x²≥0
√2 ∞ ∑ ∫ ≈ ≠
►◄▲▼
★☆♥♦♣♠
✓✗✔✘
<lora:name:0.8>
a, b; c: d. e! f?
,a
a,
 ,a , b ,
"""
PUNCTUATION = PUNCTUATION.strip("\n").split("\n")

DIGITS = ["0", "1", "12", "123", "1234", "12345", "0123456789", "1,000,000", "1.5", "1st 2nd 3rd 4th", "a1b2c3", "1a", "a1", "٠١٢٣", "१२३", "１２３", "Ⅷ ⅷ", "①②③", "²³", "x²", "4k8k", "2026-11-30", "12:34:56"]

LATIN = [
    "café", "cafe\u0301", "naïve", "nai\u0308ve", "résumé", "Ångström", "A\u030angstro\u0308m", "ÀÉÎÕÜ", "àéîõü", "ñandú", "Ñ", "garçon", "Straße", "STRASSE", "ẞ", "ß", "Œuvre", "Æsir", "æ", "Þór", "ð",
    "Łódź", "Čeština", "Žluťoučký kůň", "Magyarország ő ű", "İstanbul", "ISTANBUL ıi", "i\u0307", "Việt Nam", "Vie\u0323\u0302t", "e\u0301\u0301", "a\u0300\u0301\u0302", "\u0301", "\u0301a",
    "ﬁne ﬂow", "ﬃ", "Ǆ ǅ ǆ", "Ĳ ĳ", "ŉ", "ſ", "K", "Å", "Ω", "ℌ", "µ μ", "ｆｕｌｌｗｉｄｔｈ ＴＥＸＴ", "𝓼𝓬𝓻𝓲𝓹𝓽", "𝐁𝐎𝐋𝐃", "🅰🅱", "mañana por la mañana", "Ça va? Où ça!", "ÉCOLE", "E\u0301COLE",
]

SCRIPTS = [
    "Привет, мир", "ПРИВЕТ МИР", "Ёлка ёж", "Україна їжак", "Γειά σου Κόσμε", "ΟΔΟΣ", "ΣΊΣΥΦΟΣ", "Σ", "ὈΔΥΣΣΕΎΣ ᾳ ᾼ", "Հայերեն", "ᲡᲐᲥᲐᲠᲗᲕᲔᲚᲝ საქართველო",
    "שלום עולם", "שָׁלוֹם", "مرحبا بالعالم", "مَرْحَبًا", "سلام دنیا ۱۲۳", "नमस्ते दुनिया", "हिन्दी क्षेत्र", "বাংলা", "தமிழ்", "తెలుగు", "ไทย สวัสดี", "ສະບາຍດີ", "မြန်မာ", "ខ្មែរ", "བོད་", "አማርኛ", "ᏣᎳᎩ", "ꭰꭱ",
    "你好世界", "一只猫的照片", "繁體中文", "こんにちは世界", "カタカナ", "ｶﾀｶﾅ", "ひらがなとカタカナと漢字", "が か\u3099", "ガ カ\u3099", "日本語のプロンプト、猫。", "안녕하세요 세계", "한글", "\u1112\u1161\u11ab\u1100\u1173\u11af", "𠮷野家", "中文and English混合123",
    "「引用」", "，。！？", "〜ー・", "㍿", "ﷺ", "𐐀𐐨", "𒀀", "🀄麻雀",
]

EMOJI = [
    "🙂", "😀😁😂", "a 🙂 b", "a🙂b", "👍🏽", "👨‍👩‍👧‍👦", "👩🏾‍🚀", "🏳️‍🌈", "🇩🇪", "🇺🇸🇬🇧", "1️⃣", "#️⃣", "❤️", "❤", "☺️", "♥️", "🔥🔥🔥", "🤖 art", "🧑‍💻 coding", "🐈‍⬛", "👁️‍🗨️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "\U0001f1e6", "🫠", "🪿", "cat🐱dog🐶", "💯%", "✨magic✨",
]

CONTROL = [
    "", " ", "  ", "\t", "\n", "\r\n", " a", "a ", "  a  b  ", "a\tb", "a\nb", "a\r\nb", "a\n\n\nb", "a\u00a0b", "a\u2003b", "a\u3000b", "a\u2028b", "a\u2029b", "a\u0085b", "a\u000bb", "a\u000cb", "a\u1680b",
    "a\u200bb", "a\u200cb", "a\u200db", "\ufeffa", "a\u00adb", "a\u2060b", "a\u0000b", "a\u0001b", "a\u001fb", "a\u007fb", "a\u0080b", "a\u009fb", "\u202eabc\u202c", "a\ufe0fb", "a\ufffdb", "\uffff", "\U0010ffff", "\ue000", "a\u180eb", "\u200e", "\u0000",
    "   leading and trailing   ", "multiple    inner     spaces", "tab\tseparated\tvalues", "line one\nline two\nline three",
]

MIXED = [
    "A beautiful painting of a singular lighthouse, shining its light across a tumultuous sea of blood by greg rutkowski and thomas kinkade, Trending on artstation.",
    "photo of a (red:1.3) car, [blurry], ((detailed)), <lora:test:0.7>",
    "\"Hello,\" she said; 'goodbye' — he replied… (softly)",
    "Schrödinger's cat can't be 100% alive & dead @ the same time!",
    "mojibake: cafÃ© â€œquotesâ€\u009d doesnâ€™t",
    "1girl,solo,long_hair,blue_eyes,(masterpiece:1.2),best_quality",
    "a\\(b\\) c\\\\d", "C++ C# F# .NET", "AT&T Q&A R&B", "e.g. i.e. etc. vs. Mr. Dr.", "50mm f/1.4 ISO100 1/250s", "#FF00FF rgb(255,0,255)", "x=y+z*2^n", "foo::bar->baz()", "I'll I'LL i'Ll", "'S 'T 'RE 'VE 'M 'LL 'D", "a'sb a'tb", "12's 90's '90s",
    "word " * 100, "verylongword" * 20, "🙂" * 40, "猫" * 50, "a,b," * 60, "!" * 100, "1234567890" * 10,
]

# The literal markers are special tokens to the reference, so it does not split them.
SPECIAL = ["<|startoftext|>", "<|endoftext|>", "a<|endoftext|>b", "a <|startoftext|> b", "<|ENDOFTEXT|>", "<|endoftext|", "<|pad|>"]


def main():
    tokenizer = vocab.clip_tokenizer()
    texts = list(dict.fromkeys(PLAIN + CONTRACTIONS + PUNCTUATION + DIGITS + LATIN + SCRIPTS + EMOJI + CONTROL + MIXED))
    assert len(texts) >= 300
    assert vocab.ids(tokenizer, "a photo of a cat") == [320, 1125, 539, 320, 2368]
    fixture.save_json("clip_tokens", {
        "source": f"transformers {fixture.version('transformers')} CLIPTokenizer, tokenizers {fixture.version('tokenizers')}",
        "script": "oracle/clip_tokens.py",
        "cleaning": "NFC, runs of whitespace become one space, per-character lower case; no ftfy, no HTML unescape",
        "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "vocab_size": len(tokenizer),
        "cases": [[text, vocab.ids(tokenizer, text)] for text in texts],
        "special": [[text, vocab.ids(tokenizer, text)] for text in SPECIAL],
    })


if __name__ == "__main__":
    main()
