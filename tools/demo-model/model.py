"""The three networks of a Stable Diffusion 1.x checkpoint, at toy size.

Modules are named so that `state_dict()` keys are the names of the original
single-file layout once the prefixes of `PREFIXES` are put in front.  The
arithmetic is that of SD 1.x; only the widths differ.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

PREFIXES = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text": "cond_stage_model.transformer.",
}

GROUPS = 32
UNET_HEADS = 8
CONTEXT_LENGTH = 77
VOCABULARY = 49408
LATENT_SCALE = 0.18215

UNET_CHANNELS = (64, 64, 96)
UNET_ATTENTION = (False, True, False)
UNET_RES_BLOCKS = 1
TEXT_WIDTH = 64
TEXT_LAYERS = 3
ENCODER_CHANNELS = (32, 32, 32, 96)
DECODER_CHANNELS = (96, 32, 64, 64)


def zero(module):
    """Start a layer at zero, so that its branch is silent at first."""
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


# ---------------------------------------------------------------- autoencoder


def vae_norm(channels):
    return nn.GroupNorm(GROUPS, channels, eps=1e-6)


class VaeResBlock(nn.Module):
    """Two convolutions around a shortcut.

    While `bypass` is set only the shortcut runs.  The last convolution starts
    at zero, so a block that never left bypass computes the same thing.
    """

    def __init__(self, cin, cout):
        super().__init__()
        self.norm1 = vae_norm(cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.norm2 = vae_norm(cout)
        self.conv2 = zero(nn.Conv2d(cout, cout, 3, padding=1))
        self.nin_shortcut = nn.Conv2d(cin, cout, 1) if cin != cout else None
        self.bypass = False

    def forward(self, x):
        shortcut = x if self.nin_shortcut is None else self.nin_shortcut(x)
        if self.bypass:
            return shortcut
        h = self.conv1(F.silu(self.norm1(x)))
        return shortcut + self.conv2(F.silu(self.norm2(h)))


class VaeAttention(nn.Module):
    """Self-attention with a single head over all positions."""

    def __init__(self, c):
        super().__init__()
        self.norm = vae_norm(c)
        self.q = nn.Conv2d(c, c, 1)
        self.k = nn.Conv2d(c, c, 1)
        self.v = nn.Conv2d(c, c, 1)
        self.proj_out = zero(nn.Conv2d(c, c, 1))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (f(h).flatten(2).transpose(1, 2)[:, None] for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(out[:, 0].transpose(1, 2).reshape(x.shape))


class VaeMid(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block_1 = VaeResBlock(c, c)
        self.attn_1 = VaeAttention(c)
        self.block_2 = VaeResBlock(c, c)

    def forward(self, x):
        return self.block_2(self.attn_1(self.block_1(x)))


class VaeLevel(nn.Module):
    pass


class VaeResize(nn.Module):
    """A halving (padded on the right and bottom only) or doubling convolution."""

    def __init__(self, c, down):
        super().__init__()
        self.down = down
        self.conv = nn.Conv2d(c, c, 3, stride=2) if down else nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        if self.down:
            return self.conv(F.pad(x, (0, 1, 0, 1)))
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


# Strength of the constant channels that `carry_levels` sets up.
CARRY = 3.0


@torch.no_grad()
def carry_levels(conv, sources):
    """Let flat colours pass the group norm that follows `conv` and a shortcut.

    A norm over groups of three channels removes the mean and the size of each
    group, and with them the level of a flat picture.  Channels that start as
    (a, k, -k - a) have zero mean and a size that is nearly constant, so `a`
    comes out almost unharmed.  The first groups carry `sources`.
    """
    assert conv.out_channels == 3 * GROUPS
    for g, source in enumerate(sources):
        conv.weight[3 * g] = 0
        conv.weight[3 * g, source] = 1
    conv.weight[1::3] *= 0.05
    conv.weight[2::3] = -conv.weight[0::3] - conv.weight[1::3]
    conv.bias[0::3] = 0
    conv.bias[1::3] = CARRY
    conv.bias[2::3] = -CARRY


@torch.no_grad()
def pass_through(conv, count, kernel):
    """Make the first `count` outputs of a convolution filtered copies of its inputs."""
    for c in range(count):
        conv.weight[c] = 0
        conv.weight[c, c] = torch.as_tensor(kernel)
        conv.bias[c] = 0


@torch.no_grad()
def read_levels(conv, count):
    """Make outputs of `conv` the channels that `carry_levels` put in the first groups.

    Behind the norm a carried value is divided by about 0.82 * CARRY, and SiLU
    halves small values.
    """
    conv.weight.zero_()
    conv.bias.zero_()
    for c in range(count):
        conv.weight[c, 3 * c, 1, 1] = 2 * (2 / 3) ** 0.5 * CARRY


CENTER = [[0.0, 0, 0], [0, 1, 0], [0, 0, 0]]
AVERAGE = [[0.25, 0.25, 0], [0.25, 0.25, 0], [0, 0, 0]]
SMOOTH = [[1 / 16, 2 / 16, 1 / 16], [2 / 16, 4 / 16, 2 / 16], [1 / 16, 2 / 16, 1 / 16]]


class Encoder(nn.Module):
    def __init__(self, channels, blocks=1):
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels[0], 3, padding=1)
        self.down = nn.ModuleList()
        c = channels[0]
        for i, width in enumerate(channels):
            level = VaeLevel()
            level.block = nn.ModuleList()
            for _ in range(blocks):
                level.block.append(VaeResBlock(c, width))
                c = width
            if i + 1 < len(channels):
                level.downsample = VaeResize(c, True)
            self.down.append(level)
        self.mid = VaeMid(c)
        self.norm_out = vae_norm(c)
        self.conv_out = nn.Conv2d(c, 8, 3, padding=1)
        # Start as a network that averages colours over 8x8 blocks.
        pass_through(self.conv_in, 3, CENTER)
        for level in self.down[:-1]:
            pass_through(level.downsample.conv, 3, AVERAGE)
        carry_levels(self.down[-1].block[0].nin_shortcut, [0, 1, 2])
        read_levels(self.conv_out, 3)
        nn.init.normal_(self.conv_out.weight[3], std=0.02)
        nn.init.constant_(self.conv_out.bias[4:], -5.0)

    def forward(self, x):
        h = self.conv_in(x)
        for level in self.down:
            for block in level.block:
                h = block(h)
            if hasattr(level, "downsample"):
                h = level.downsample(h)
        return self.conv_out(F.silu(self.norm_out(self.mid(h))))


class Decoder(nn.Module):
    def __init__(self, channels, blocks=1):
        super().__init__()
        c = channels[-1]
        self.conv_in = nn.Conv2d(4, c, 3, padding=1)
        self.mid = VaeMid(c)
        levels = []
        for i, width in reversed(list(enumerate(channels))):
            level = VaeLevel()
            level.block = nn.ModuleList()
            for _ in range(blocks + 1):
                level.block.append(VaeResBlock(c, width))
                c = width
            if i > 0:
                level.upsample = VaeResize(c, False)
            levels.insert(0, level)
        # up.0 is the level of full resolution, and runs last.
        self.up = nn.ModuleList(levels)
        self.norm_out = vae_norm(c)
        self.conv_out = nn.Conv2d(c, 3, 3, padding=1)
        # Start as a network that blends the colours of neighbouring blocks.
        pass_through(self.conv_in, 3, CENTER)
        for level in levels:
            if hasattr(level, "upsample"):
                pass_through(level.upsample.conv, 3, SMOOTH)
            shortcut = level.block[0].nin_shortcut
            if shortcut is not None:
                pass_through(shortcut, 3, [[1.0]])
        carry_levels(self.up[0].block[0].nin_shortcut, [0, 1, 2])
        read_levels(self.conv_out, 3)

    def forward(self, z):
        h = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            for block in level.block:
                h = block(h)
            if hasattr(level, "upsample"):
                h = level.upsample(h)
        return self.conv_out(F.silu(self.norm_out(h)))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder(ENCODER_CHANNELS)
        self.decoder = Decoder(DECODER_CHANNELS)
        self.quant_conv = nn.Conv2d(8, 8, 1)
        self.post_quant_conv = nn.Conv2d(4, 4, 1)
        pass_through(self.quant_conv, 8, [[1.0]])
        pass_through(self.post_quant_conv, 4, [[1.0]])

    def moments(self, x):
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, 1)
        return mean, logvar.clamp(-30, 20)

    def decode(self, z):
        return self.decoder(self.post_quant_conv(z))

    @torch.no_grad()
    def fold_scale(self, mean, std):
        """Make latents with these per-channel statistics come out with mean zero
        and standard deviation 1 / LATENT_SCALE, without changing the pictures.
        """
        gain = 1.0 / (LATENT_SCALE * std)
        self.quant_conv.weight[:4] *= gain[:, None, None, None]
        self.quant_conv.bias[:4] = (self.quant_conv.bias[:4] - mean) * gain
        self.quant_conv.bias[4:] += 2 * gain.log()
        self.post_quant_conv.bias += self.post_quant_conv.weight[:, :, 0, 0] @ mean
        self.post_quant_conv.weight /= gain[None, :, None, None]


# ----------------------------------------------------------------------- UNet


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb):
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(GROUPS, cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, cout))
        self.out_layers = nn.Sequential(nn.GroupNorm(GROUPS, cout), nn.SiLU(), nn.Identity(),
                                        zero(nn.Conv2d(cout, cout, 3, padding=1)))
        self.skip_connection = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb, context):
        h = self.in_layers(x) + self.emb_layers(emb)[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


class CrossAttention(nn.Module):
    def __init__(self, c, context):
        super().__init__()
        self.to_q = nn.Linear(c, c, bias=False)
        self.to_k = nn.Linear(context, c, bias=False)
        self.to_v = nn.Linear(context, c, bias=False)
        self.to_out = nn.Sequential(nn.Linear(c, c))

    def forward(self, x, context):
        b, n, c = x.shape
        q, k, v = (t.view(b, -1, UNET_HEADS, c // UNET_HEADS).transpose(1, 2)
                   for t in (self.to_q(x), self.to_k(context), self.to_v(context)))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, c))


class GatedProjection(nn.Module):
    def __init__(self, c, inner):
        super().__init__()
        self.proj = nn.Linear(c, inner * 2)

    def forward(self, x):
        value, gate = self.proj(x).chunk(2, -1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.net = nn.Sequential(GatedProjection(c, c * 4), nn.Identity(), nn.Linear(c * 4, c))

    def forward(self, x):
        return self.net(x)


class TransformerBlock(nn.Module):
    def __init__(self, c, context):
        super().__init__()
        self.norm1 = nn.LayerNorm(c)
        self.attn1 = CrossAttention(c, c)
        self.norm2 = nn.LayerNorm(c)
        self.attn2 = CrossAttention(c, context)
        self.norm3 = nn.LayerNorm(c)
        self.ff = FeedForward(c)

    def forward(self, x, context):
        h = self.norm1(x)
        x = x + self.attn1(h, h)
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    def __init__(self, c, context):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, c, eps=1e-6)
        self.proj_in = nn.Conv2d(c, c, 1)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(c, context)])
        self.proj_out = zero(nn.Conv2d(c, c, 1))

    def forward(self, x, emb, context):
        b, c, h, w = x.shape
        t = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        t = self.transformer_blocks[0](t, context)
        return x + self.proj_out(t.transpose(1, 2).reshape(b, c, h, w))


class Downsample(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.op = nn.Conv2d(c, c, 3, stride=2, padding=1)

    def forward(self, x, emb, context):
        return self.op(x)


class Upsample(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x, emb, context):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Stem(nn.Conv2d):
    def forward(self, x, emb, context):
        return super().forward(x)


class Stage(nn.ModuleList):
    """Layers in a row that all take (x, time embedding, context)."""

    def forward(self, x, emb, context):
        for layer in self:
            x = layer(x, emb, context)
        return x


def timestep_embedding(t, dim):
    """Cosines, then sines, of the step at geometric frequencies."""
    half = dim // 2
    freqs = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32) / half)
    args = t.float()[:, None] * freqs[None]
    return torch.cat([args.cos(), args.sin()], 1)


class UNet(nn.Module):
    def __init__(self, channels=UNET_CHANNELS, attention=UNET_ATTENTION,
                 blocks=UNET_RES_BLOCKS, context=TEXT_WIDTH):
        super().__init__()
        base = channels[0]
        emb = base * 4
        self.base = base
        self.time_embed = nn.Sequential(nn.Linear(base, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.input_blocks = nn.ModuleList([Stage([Stem(4, base, 3, padding=1)])])
        c, skips = base, [base]
        for i, width in enumerate(channels):
            for _ in range(blocks):
                layers = [ResBlock(c, width, emb)]
                if attention[i]:
                    layers.append(SpatialTransformer(width, context))
                self.input_blocks.append(Stage(layers))
                c = width
                skips.append(c)
            if i + 1 < len(channels):
                self.input_blocks.append(Stage([Downsample(c)]))
                skips.append(c)
        self.middle_block = Stage([ResBlock(c, c, emb), SpatialTransformer(c, context), ResBlock(c, c, emb)])
        self.output_blocks = nn.ModuleList()
        for i, width in reversed(list(enumerate(channels))):
            for j in range(blocks + 1):
                layers = [ResBlock(c + skips.pop(), width, emb)]
                c = width
                if attention[i]:
                    layers.append(SpatialTransformer(c, context))
                if i > 0 and j == blocks:
                    layers.append(Upsample(c))
                self.output_blocks.append(Stage(layers))
        self.out = nn.Sequential(nn.GroupNorm(GROUPS, c), nn.SiLU(), zero(nn.Conv2d(c, 4, 3, padding=1)))
        self.start_as_copy()

    @torch.no_grad()
    def start_as_copy(self):
        """Begin by answering that the input is all noise.

        That is nearly right for the noisiest steps.  Each latent channel runs
        as a pair (x, -x) along the outermost skip: a pair fills one norm group,
        and silu(x) - silu(-x) is x again.
        """
        stem, last, final = self.input_blocks[0][0], self.output_blocks[-1][0], self.out[2]
        skip = last.skip_connection
        offset = skip.in_channels - stem.out_channels
        assert self.out[0].num_channels == 2 * GROUPS
        for c in range(4):
            for i, sign in ((2 * c, 1.0), (2 * c + 1, -1.0)):
                stem.weight[i] = 0
                stem.bias[i] = 0
                stem.weight[i, c, 1, 1] = sign
                skip.weight[i] = 0
                skip.bias[i] = 0
                skip.weight[i, offset + i] = 1
                final.weight[c, i, 1, 1] = sign

    def forward(self, x, t, context):
        emb = self.time_embed(timestep_embedding(t, self.base))
        skips = []
        for stage in self.input_blocks:
            x = stage(x, emb, context)
            skips.append(x)
        x = self.middle_block(x, emb, context)
        for stage in self.output_blocks:
            x = stage(torch.cat([x, skips.pop()], 1), emb, context)
        return self.out(x)


# --------------------------------------------------------------- text encoder


class TextAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.k_proj = nn.Linear(c, c)
        self.v_proj = nn.Linear(c, c)
        self.q_proj = nn.Linear(c, c)
        self.out_proj = nn.Linear(c, c)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (f(x).view(b, n, c // 64, 64).transpose(1, 2)
                   for f in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).reshape(b, n, c))


class TextMlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c, c * 4)
        self.fc2 = nn.Linear(c * 4, c)

    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(h * torch.sigmoid(1.702 * h))


class TextLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = TextAttention(c)
        self.layer_norm1 = nn.LayerNorm(c)
        self.mlp = TextMlp(c)
        self.layer_norm2 = nn.LayerNorm(c)

    def forward(self, x):
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


def through_f8(w):
    """Round to float8 e4m3 going forward; pass gradients straight through."""
    return w + (w.to(torch.float8_e4m3fn).to(w.dtype) - w).detach()


class TextEmbeddings(nn.Module):
    """A token table that keeps only the rows in use, rounded as the file stores them.

    Row 0 of the compact table is held at zero: it stands for every token that
    the captions never use.
    """

    def __init__(self, rows, c):
        super().__init__()
        self.token_embedding = nn.Embedding(rows, c)
        self.position_embedding = nn.Embedding(CONTEXT_LENGTH, c)
        nn.init.normal_(self.token_embedding.weight, std=0.5)
        nn.init.normal_(self.position_embedding.weight, std=0.15)

    def forward(self, ids):
        table = through_f8(self.token_embedding.weight)
        table = torch.cat([torch.zeros_like(table[:1]), table[1:]])
        return F.embedding(ids, table) + self.position_embedding.weight[: ids.shape[1]]


class TextInner(nn.Module):
    def __init__(self, rows, c, layers):
        super().__init__()
        self.embeddings = TextEmbeddings(rows, c)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList([TextLayer(c) for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(c)

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.final_layer_norm(x)


class TextEncoder(nn.Module):
    def __init__(self, rows, width=TEXT_WIDTH, layers=TEXT_LAYERS):
        super().__init__()
        self.text_model = TextInner(rows, width, layers)

    def forward(self, ids):
        return self.text_model(ids)


def parameter_count(module):
    return sum(p.numel() for p in module.parameters())


if __name__ == "__main__":
    for name, net in (("vae", Autoencoder()), ("unet", UNet()), ("text", TextEncoder(100))):
        print(name, parameter_count(net))
