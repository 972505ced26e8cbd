"""Textual inversions as the programs that train them save them: the words `red circle` of the demo model as vectors of a word.

Reference: `torch.save` on the objects of the original code (a ParameterDict), of A1111's web UI and of diffusers. The vectors are rows of the
demo model's own table of tokens, so that a prompt with the word draws what the prompt with the two words draws.
"""

import torch
from safetensors.torch import load_file, save_file

import fixture
import vocab

DEMO = fixture.FIXTURES.parent.parent / "assets" / "demo.safetensors"
TEXT = "red circle"


def main():
    table = next(t for n, t in load_file(DEMO).items() if n.endswith("token_embedding.weight")).float()
    ids = vocab.clip_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    vectors = table[ids].clone()
    assert vectors.shape[0] == 2
    web = {"string_to_token": {"*": 265}, "string_to_param": {"*": vectors}, "name": "heron", "step": 500, "sd_checkpoint": None, "sd_checkpoint_name": None}
    original = {"string_to_token": {"*": torch.tensor(265)}, "string_to_param": torch.nn.ParameterDict({"*": torch.nn.Parameter(vectors)})}
    for name, value, zipped in (
        ("embedding_web.pt", web, True),
        ("embedding_web_legacy.pt", web, False),
        ("embedding_original.pt", original, True),
        ("embedding_diffusers.bin", {"<heron>": vectors}, True),
    ):
        path = fixture.FIXTURES / name
        torch.save(value, path, _use_new_zipfile_serialization=zipped)
        print(f"{name}: {path.stat().st_size} bytes")
    save_file({"emb_params": vectors}, fixture.FIXTURES / "embedding.safetensors")


if __name__ == "__main__":
    main()
