"""Prompt weights and windows of 75 tokens.

`attention`: the syntax that A1111's webui documents. Each expectation is written by hand from the rules:
  (x) multiplies by 1.1, [x] divides by 1.1, (x:w) multiplies by w; they nest and multiply; a bracket left open reaches the end;
  a closing bracket without an opener, and `:` outside `(x:w)`, are text; backslash makes the next bracket or backslash text;
  BREAK as a whole word, with the blanks around it, becomes ["BREAK", -1]; neighbours of equal weight merge; no text gives ["", 1].
`windows`: the pieces are tokenised one by one (transformers' CLIPTokenizer), cut after every 75 tokens, and BREAK fills up the current
window. A window that is exactly full needs no filling. Every window is start, 75 tokens, end; fillers are the end token with weight 1.
"""

import fixture
import vocab

UP, DOWN = 1.1, 1 / 1.1

ATTENTION = [
    ("", [["", 1]]),
    (" ", [[" ", 1]]),
    ("normal text", [["normal text", 1]]),
    ("an (important) word", [["an ", 1], ["important", UP], [" word", 1]]),
    ("an [unimportant] word", [["an ", 1], ["unimportant", DOWN], [" word", 1]]),
    ("(x:1.3)", [["x", 1.3]]),
    ("(x:0)", [["x", 0]]),
    ("(x:.5)", [["x", 0.5]]),
    ("(x:2.)", [["x", 2]]),
    ("(x:-1.5)", [["x", -1.5]]),
    ("(x:+1.5)", [["x", 1.5]]),
    ("( x :1.3)", [[" x ", 1.3]]),
    ("a (b c:1.2) d", [["a ", 1], ["b c", 1.2], [" d", 1]]),
    ("((x))", [["x", UP * UP]]),
    ("(((x)))", [["x", UP * UP * UP]]),
    ("[[x]]", [["x", DOWN * DOWN]]),
    ("[(x)]", [["x", UP * DOWN]]),
    ("([x])", [["x", DOWN * UP]]),
    ("((x:1.3))", [["x", 1.3 * UP]]),
    ("((x:1.3):1.5)", [["x", 1.3 * 1.5]]),
    ("[(x:1.3)]", [["x", 1.3 * DOWN]]),
    ("(a [b] c)", [["a ", UP], ["b", DOWN * UP], [" c", UP]]),
    ("(a (b) c)", [["a ", UP], ["b", UP * UP], [" c", UP]]),
    ("(a (b:2) c:0.5)", [["a ", 0.5], ["b", 2 * 0.5], [" c", 0.5]]),
    # An open bracket reaches the end of the text.
    ("(unbalanced", [["unbalanced", UP]]),
    ("a (b", [["a ", 1], ["b", UP]]),
    ("((a) b", [["a", UP * UP], [" b", UP]]),
    ("[a", [["a", DOWN]]),
    ("(a [b", [["a ", UP], ["b", UP * DOWN]]),
    # A closer without an opener is text.
    ("a) b", [["a) b", 1]]),
    ("a] b", [["a] b", 1]]),
    ("a (b)) c", [["a ", 1], ["b", UP], [") c", 1]]),
    # The bracket kinds are matched separately, so a crossing pair closes what it names.
    ("(a [b) c]", [["a ", UP], ["b", UP * DOWN], [" c", DOWN]]),
    # `:w` counts only straight before `)`, and only with an open `(`.
    ("a:b", [["a:b", 1]]),
    ("a:1.2", [["a:1.2", 1]]),
    ("a:1.2)", [["a:1.2)", 1]]),
    ("(a:b)", [["a:b", UP]]),
    ("(a:1.2 b)", [["a:1.2 b", UP]]),
    ("[a:1.2]", [["a:1.2", DOWN]]),
    ("(a:b:1.2)", [["a:b", 1.2]]),
    ("ratio 16:9 (wide)", [["ratio 16:9 ", 1], ["wide", UP]]),
    # Empty brackets hold no text.
    ("()", [["", 1]]),
    ("(:1.3)", [["", 1]]),
    ("a()b", [["ab", 1]]),
    # Escapes.
    (r"\(literal\]", [["(literal]", 1]]),
    (r"\(a\)", [["(a)", 1]]),
    (r"\[a\]", [["[a]", 1]]),
    (r"a\\b", [["a\\b", 1]]),
    (r"\\(a)", [["\\", 1], ["a", UP]]),
    (r"(a\))", [["a)", UP]]),
    (r"(a\(b\):1.3)", [["a(b)", 1.3]]),
    (r"hatsune miku \(vocaloid\), (smile:1.2)", [["hatsune miku (vocaloid), ", 1], ["smile", 1.2]]),
    # A backslash before anything else, or at the end, vanishes.
    ("a\\b", [["ab", 1]]),
    ("a\\", [["a", 1]]),
    # Neighbours of equal weight merge.
    ("(unnecessary)(parens)", [["unnecessaryparens", UP]]),
    ("(a:1.2)(b:1.2)", [["ab", 1.2]]),
    ("(a:1.2) (b:1.2)", [["a", 1.2], [" ", 1], ["b", 1.2]]),
    ("(a:1)b", [["ab", 1]]),
    (
        "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
        # The first of three openers stays open: everything after `a ` is raised once more.
        # `[on]`: 1/1.1 and then 1.1 give 1.
        [["a ", 1], ["house", 1.3 * UP * UP], [" ", UP], ["on", 1], [" a ", UP], ["hill", 0.5 * UP], [", sun, ", UP], ["sky", UP * UP * UP * UP], [".", UP]],
    ),
    # BREAK.
    ("a BREAK b", [["a", 1], ["BREAK", -1], ["b", 1]]),
    ("a  BREAK\nb", [["a", 1], ["BREAK", -1], ["b", 1]]),
    ("a, BREAK, b", [["a,", 1], ["BREAK", -1], [", b", 1]]),
    ("BREAK a", [["", 1], ["BREAK", -1], ["a", 1]]),
    ("a BREAK", [["a", 1], ["BREAK", -1], ["", 1]]),
    ("BREAK", [["", 1], ["BREAK", -1], ["", 1]]),
    ("a BREAK BREAK b", [["a", 1], ["BREAK", -1], ["", 1], ["BREAK", -1], ["b", 1]]),
    ("(a) BREAK (b:1.2)", [["a", UP], ["", 1], ["BREAK", -1], ["", 1], ["b", 1.2]]),
    ("BREAKFAST", [["BREAKFAST", 1]]),
    ("break a", [["break a", 1]]),
    ("a break b", [["a break b", 1]]),
    ("a_BREAK b", [["a_BREAK b", 1]]),
    ("a-BREAK-b", [["a-", 1], ["BREAK", -1], ["-b", 1]]),
    # Text beyond ASCII.
    ("(猫:1.2)と[犬]", [["猫", 1.2], ["と", 1], ["犬", DOWN]]),
    ("un café (très) chaud 🙂", [["un café ", 1], ["très", UP], [" chaud 🙂", 1]]),
    ("line one\nline (two)", [["line one\nline ", 1], ["two", UP]]),
]

WORD = "cat "  # one token

WINDOWS = [
    [["", 1]],
    [["a photo of a cat", 1]],
    [["a ", 1], ["red", 1.3], [" cat", 1]],
    [[WORD * 74, 1]],
    [[WORD * 75, 1]],
    [[WORD * 76, 1]],
    [[WORD * 150, 1]],
    [[WORD * 151, 1]],
    [[WORD * 74, 1], ["a, b", 1.2]],
    [["a", 1], ["BREAK", -1], ["b", 1]],
    [["", 1], ["BREAK", -1], ["b", 1]],
    [["a", 1], ["BREAK", -1], ["", 1]],
    [["a", 1], ["BREAK", -1], ["", 1], ["BREAK", -1], ["b", 1]],
    [[WORD * 75, 1], ["BREAK", -1], ["b", 1]],
    [[WORD * 76, 1], ["BREAK", -1], ["b", 0.9]],
    [["masterpiece, best quality, a castle on a hill above a misty valley at dawn, " * 6, 1], ["golden light", 1.25], [", birds, clouds, distant mountains, a river" * 4, 1]],
]


def windows(tokenizer, pieces):
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    done, current = [], []

    def flush():
        filled = current + [(eos, 1)] * (75 - len(current))
        done.append([(bos, 1), *filled, (eos, 1)])
        current.clear()

    for text, weight in pieces:
        if (text, weight) == ("BREAK", -1):
            flush()
            continue
        for token in vocab.ids(tokenizer, text):
            if len(current) == 75:
                flush()
            current.append((token, weight))
    if current or not done:
        flush()
    return done


def main():
    tokenizer = vocab.clip_tokenizer()
    cases = []
    for pieces in WINDOWS:
        found = windows(tokenizer, pieces)
        cases.append({"pieces": pieces, "ids": [[token for token, _ in w] for w in found], "weights": [[weight for _, weight in w] for w in found]})
    fixture.save_json("prompts", {
        "source": f"the rules of A1111's prompt syntax, by hand; ids from transformers {fixture.version('transformers')} CLIPTokenizer",
        "script": "oracle/prompts.py",
        "attention": [[text, expected] for text, expected in ATTENTION],
        "windows": cases,
    })


if __name__ == "__main__":
    main()
