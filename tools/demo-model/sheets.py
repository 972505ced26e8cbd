"""Draw the pictures of the documentation with the demo model, several in one file.

    python sheets.py --program target/release/sd-cli

Run it from the repository's root: it reads `assets` and writes to `docs/images`.
"""

import argparse
import pathlib
import subprocess
import tempfile

from PIL import Image, ImageDraw

SIDE = 128
IMAGES = pathlib.Path("docs/images")
STAR = "a large yellow star on a purple background"


def sheet(name, rows, columns, labels=(), side=SIDE):
    """Writes rows of pictures as one JPEG, with words above the columns and before the rows."""
    left, top, step = (80 if labels else 0), 16, side + 4
    picture = Image.new("RGB", (left + step * len(rows[0]) - 4, top + step * len(rows) - 4), "white")
    draw = ImageDraw.Draw(picture)
    for x, words in enumerate(columns):
        draw.text((left + step * x + side // 2, 2), words, fill="black", anchor="ma")
    for y, row in enumerate(rows):
        if labels:
            draw.text((left - 8, top + step * y + side // 2), labels[y], fill="black", anchor="rm")
        for x, path in enumerate(row):
            picture.paste(Image.open(path).convert("RGB").resize((side, side)), (left + step * x, top + step * y))
    picture.save(IMAGES / f"{name}.jpg", quality=82)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/sd-cli")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp())
    count = 0

    def draw(*options):
        nonlocal count
        count += 1
        path = folder / f"{count}.png"
        subprocess.run([args.program, "--log-level", "error", "-o", path, *map(str, options)], check=True)
        return path

    samplers, steps = ["euler", "euler_a", "dpm++2m", "dpm++2m_sde", "lcm"], [2, 4, 6, 10, 20]
    rows = [[draw("-p", STAR, "--sampling-method", name, "--steps", n) for n in steps] for name in samplers]
    sheet("samplers", rows, [f"{n} steps" for n in steps], samplers, SIDE // 2)

    schedules, steps = ["discrete", "karras", "exponential", "ays", "beta"], [4, 6, 10, 20]
    method = ("-p", STAR, "--sampling-method", "dpm++2m")
    rows = [[draw(*method, "--scheduler", name, "--steps", n) for n in steps] for name in schedules]
    sheet("schedules", rows, [f"{n} steps" for n in steps], schedules, SIDE // 2)

    circle = draw("-p", "a red circle")
    strengths = [0.2, 0.4, 0.6, 0.8, 1]
    row = [draw("-p", "a blue circle", "-i", circle, "--strength", s) for s in strengths]
    sheet("strength", [[circle, *row]], ["the picture", *map(str, strengths)])

    mask = Image.new("L", (SIDE, SIDE), 0)
    mask.paste(255, (16, 16, 112, 112))
    mask.save(IMAGES / "mask.png")
    square = draw("-p", "a blue square on a yellow background")
    star = ("-p", "a red star on a yellow background", "-i", square, "--mask", IMAGES / "mask.png")
    inpaint = ("-m", "assets/demo.safetensors", "--diffusion-model", "assets/demo-inpaint.safetensors")
    row = [square, IMAGES / "mask.png", draw(*star), draw(*inpaint, *star)]
    sheet("inpainting", [row], ["the picture", "the mask", "any model", "inpainting model"])

    heart = draw("-p", "a small white heart in the top left on a black background", "-s", 5)
    control = ("--control-net", "assets/demo-edges.safetensors", "--control-image", heart, "--canny")
    prompts = {
        "red on blue": "a red heart on a blue background",
        "green on white": "a green heart on a white background",
        "black on pink": "a black heart, pink background",
    }
    row = [draw(*control, "-p", words) for words in prompts.values()]
    sheet("controlnet", [[heart, *row]], ["the picture", *prompts])

    strengths = [-0.5, 0, 0.5, 1]
    style = ("--lora-model-dir", "assets")
    words = "a red circle on a blue background"
    row = [draw(*style, "-p", f"{words} <lora:demo-style:{s}>") for s in strengths]
    sheet("lora", [row], [f"{s}" for s in strengths])


if __name__ == "__main__":
    main()
