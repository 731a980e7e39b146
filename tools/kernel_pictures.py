"""Pictures of the GPU's kernels for docs/kernels.md: what a block holds, and what moves when.

A picture is a strip of what lies in shared memory or in registers, and lanes of what is under way at the same
time, from left to right. Colors say what it is: weights, pixels, products, codes. An SVG has the colors of
both themes and takes those that the reader's system prefers, on a ground of its own.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, MARGIN, LABEL = 760, 16, 150
ROOM = WIDTH - 2 * MARGIN
FONT, SMALL, CHARACTER = 13, 11, 0.56
"""Sizes of text in pixels; how wide a character is at most on average, in font sizes."""

COLORS = {  # light, dark
    "ground": ("#ffffff", "#0d1117"),
    "edge": ("#d1d9e0", "#3d444d"),
    "text": ("#1f2328", "#f0f6fc"),
    "faint": ("#59636e", "#9198a1"),
    "weights": ("#e3d5fb", "#53399a"),
    "pixels": ("#c9e1ff", "#14508f"),
    "products": ("#c4ecd0", "#1c6236"),
    "codes": ("#ffdfba", "#81501c"),
    "idle": ("#eceff2", "#262c36"),
}
KINDS = ("weights", "pixels", "products", "codes")


@dataclass(frozen=True)
class Cell:
    """A part of the memory; `width` is a share."""

    text: str
    kind: str
    width: float = 1


@dataclass(frozen=True)
class Group:
    """Parts of the memory that belong together, with a name below."""

    name: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Bar:
    """What is under way from `start` on, for `length`; units of time are the picture's own."""

    start: float
    length: float
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Lane:
    """Whoever does one thing after the other."""

    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Family:
    """A picture and its paragraph."""

    title: str
    text: str
    memory: str
    groups: Sequence[Group]
    lanes: Sequence[Lane]


def row(kind: str, texts: Sequence[str], *, start: float = 0, length: float = 1, gap: float = 0) -> list[Bar]:
    """Bars of a kind, one after the other."""
    return [Bar(start + i * (length + gap), length, kind, text) for i, text in enumerate(texts)]


def turns(start: float, parts: Sequence[tuple[str, float, str]]) -> list[Bar]:
    """Bars (kind, length, text) without gaps."""
    out = []
    for kind, length, text in parts:
        out.append(Bar(start, length, kind, text))
        start += length
    return out


def stages(count: int, *cells: Cell) -> list[Group]:
    """A ring of stages that hold the same."""
    return [Group(f"stage {i}", cells) for i in range(count)]


FAMILIES = {
    "wgmma": Family(
        "wgmma: tiles of pixels and weights pass through a ring of stages",
        "A block makes the outputs of one tile: `wgmma_128x64_stages4_boxes` is 128 pixels by 64 "
        "channels. Steps of 128 bytes along K (taps and input channels) go through a ring of stages, each "
        "a tile of pixels and one of weights; a stage is filled again as soon as its products are done. "
        "With `boxes` one thread fetches both, with `producers` a warpgroup gathers the pixels; without "
        "either all of K fits the stages at once. `_cluster4`: four blocks of a cluster sum over a "
        "quarter of K each and add up. `_multicast`: two blocks that make other channels of the same pixels "
        "fetch half of them each, for both. `mma` is the same on older GPUs, whose threads copy the tiles "
        "themselves.",
        "shared memory of a block: codes take the stages' place at the end, or lie behind them with "
        "residuals",
        stages(4, Cell("pixels", "pixels", 1.2), Cell("weights", "weights")),
        [
            Lane(
                "a thread fetches",
                [*row("pixels", ["0", "1", "2", "3"]), *row("pixels", ["4", "5", "6"], start=4.4, gap=0.1)],
            ),
            Lane("a warpgroup", turns(2.1, [*(("products", 1.1, f"step {i}") for i in range(7))])),
            Lane("another one", turns(2.1, [*(("products", 1.1, f"step {i}") for i in range(7))])),
            Lane("both", [Bar(9.8, 1.4, "codes", "round"), Bar(11.2, 0.9, "codes", "store")]),
        ],
    ),
    "windows": Family(
        "windows: a patch of the image stays, weights pass through",
        "For windows of stride 1 with many weights. The block's part of the input, with the rows and "
        "columns around it that its windows reach, is fetched once, in slabs of 128 channels; every tap "
        "reads it at another place (the line of places of `halo`). Weights of one tap and slab at a time "
        "go through a ring of stages. `windows_128x64_stages4_cluster2`: 128 places by 64 channels, the "
        "slabs shared out over 2 blocks of a cluster, which add up.",
        "shared memory of a block",
        [
            Group("ring of weights", [Cell(f"tap {i}", "weights", 0.7) for i in range(4)]),
            Group(
                "patch: rows of pixels and padding, fetched once",
                [Cell("slab 0", "pixels", 1.6), Cell("slab 1", "pixels", 1.6)],
            ),
            Group("", [Cell("codes", "codes", 1)]),
        ],
        [
            Lane(
                "a warp fetches",
                [
                    *row("weights", ["t 0", "t 1", "t 2", "t 3"], length=0.9),
                    *row("weights", ["t 4", "t 5", "..."], start=4.3, length=0.9, gap=0.2),
                    *row("weights", ["t 0", "t 1", "..."], start=7.6, length=0.9, gap=0.2),
                ],
            ),
            Lane("the others fetch", [*row("pixels", ["slab 0", "slab 1"], start=0.8, length=1.4)]),
            Lane(
                "warpgroups",
                turns(
                    2.4,
                    [
                        *(("products", 1.0, f"tap {i}") for i in range(4)),
                        ("products", 1.0, "..."),
                        ("products", 1.0, "tap 0"),
                        ("products", 1.0, "tap 1"),
                        ("products", 1.0, "..."),
                        ("codes", 1.7, "round, store"),
                    ],
                ),
            ),
        ],
    ),
    "bits": Family(
        "bits: patches of halo, cut into planes of bits",
        "Windows whose codes have 1 or 2 bits and whose weights have no more. A block holds what one "
        "of `halo` holds, its weights as bits, and the planes of the patch, which its threads cut once for "
        "all taps; a step along K is two words of 128 channels each. Where the codes lie in memory as planes "
        "there are no slots: patches come as they are multiplied, and windows of one tap or with a stride "
        "are worth it, too: pixels that a stride sets apart are put together, as images of their own. "
        "Residuals in planes are added to codes that leave in planes by logic, 32 channels at once. "
        "For large products of bytes another kernel makes planes first (`packed`).",
        "shared memory of a block",
        [
            Group("fetched once", [Cell("bits of weights, ones", "weights", 2.2)]),
            Group("slots", [Cell("slab", "pixels"), Cell("slab", "pixels")]),
            Group("planes of patches i, i + 1", [Cell("bits", "pixels"), Cell("bits", "pixels")]),
            Group("of each warpgroup", [Cell("codes", "codes"), Cell("codes", "codes")]),
        ],
        [
            Lane("a warp fetches", [Bar(0, 2, "weights", "weights"), Bar(2.6, 1.6, "pixels", "slabs")]),
            Lane("the others fetch", row("pixels", ["slab 0", "slab 1"], start=0.4, length=0.8)),
            *(
                Lane(
                    f"warpgroup {i}",
                    turns(
                        2.0,
                        [
                            ("pixels", 0.8, "cut"),
                            ("products", 2.0, "bits of all taps"),
                            ("codes", 1.2, "round"),
                            ("pixels", 0.8, "cut"),
                        ],
                    ),
                )
                for i in range(2)
            ),
        ],
    ),
    "flat_bits": Family(
        "flat_bits: all of K at once, few channels a block",
        "Products of up to 512 rows, weights of 1 or 2 bits by codes of up to 4, where neither bytes nor "
        "products are many and what counts is how long a block waits. A block has 64 rows and 16, 32 or "
        "64 channels with all of K: the planes of weights side by side, so that each plane of codes is "
        "multiplied with all of them at once, and rows of ones behind them, which count the codes' own "
        "bits. Codes that lie in memory as planes come as they are multiplied, those that come as bytes "
        "are cut by twice as many threads: four fetch 64 codes of a row, and exchange sums of them until "
        "each has its own bits. `flat_bits_64x32`: 32 channels.",
        "shared memory of a block",
        [
            Group("64 rows", [Cell("plane 0", "pixels", 1.4), Cell("plane 1", "pixels", 1.4)]),
            Group(
                "channels",
                [Cell("plane 0", "weights"), Cell("plane 1", "weights"), Cell("ones", "weights", 0.7)],
            ),
        ],
        [
            Lane("a warp fetches", [Bar(0, 2, "weights", "planes of weights")]),
            Lane("all fetch", [Bar(2.4, 2.2, "pixels", "planes, or bytes to cut")]),
            Lane("a warpgroup", turns(4.6, [("products", 1.6, "bits"), ("codes", 1.8, "round, store")])),
        ],
    ),
    "halo": Family(
        "halo: a block keeps its weights, and reads every pixel once",
        "For windows of stride 1 with few weights. A block holds all weights of its channels and stays "
        "for many patches: tiles of the image with their halo, the pixels around them that windows reach. "
        "`halo_192x64_stages2` has three warpgroups with 64 places each, 64 channels, and 2 slots, so "
        "that a patch arrives while the one before is multiplied.",
        "shared memory of a block",
        [
            Group("fetched once", [Cell("weights of all taps", "weights", 2.2)]),
            Group("slot 0", [Cell("patch i", "pixels", 1.5)]),
            Group("slot 1", [Cell("patch i + 1", "pixels", 1.5)]),
            Group(
                "of each warpgroup", [Cell("codes", "codes"), Cell("codes", "codes"), Cell("codes", "codes")]
            ),
        ],
        [
            Lane("a warp fetches", [Bar(0, 2, "weights", "weights"), Bar(5.2, 1.6, "pixels", "patch 2")]),
            Lane("the others fetch", row("pixels", ["patch 0", "patch 1"], start=0.4, length=1.6)),
            Lane(
                "warpgroup 0",
                turns(
                    2.0,
                    [
                        ("products", 2.6, "tile 0: 9 taps"),
                        ("codes", 1.4, "round"),
                        ("products", 2.6, "tile 3"),
                    ],
                ),
            ),
            Lane(
                "warpgroup 1",
                turns(
                    2.2, [("products", 2.6, "tile 1"), ("codes", 1.4, "round"), ("products", 2.6, "tile 4")]
                ),
            ),
            Lane(
                "warpgroup 2",
                turns(
                    2.4, [("products", 2.6, "tile 2"), ("codes", 1.4, "round"), ("products", 2.6, "tile 5")]
                ),
            ),
        ],
    ),
    "team": Family(
        "team: warpgroups share a block's weights, each finishes tiles of its own",
        "For 1x1 layers. All warpgroups of a block, its team, multiply with the same weights in shared "
        "memory; each takes the next tile of 64 pixels, multiplies, rounds and stores without waiting for "
        "the others, so that some multiply while others round. `team_192x64_stages6`: three warpgroups, "
        "64 channels, 6 slots of pixels and codes. `_kept`: the weights of two columns of channels stay, and "
        "tiles come pixel by pixel.",
        "shared memory of a block: pixels may go once multiplied, codes once stored",
        [
            Group("fetched once", [Cell("weights", "weights", 1.7)]),
            *(
                Group(f"slot {i}", [Cell("pixels", "pixels", 1.3), Cell("res., codes", "codes", 1.7)])
                for i in range(3)
            ),
            Group("", [Cell("...", "idle", 0.5)]),
        ],
        [
            Lane("a warp fetches", row("pixels", [f"tile {i}" for i in range(7)], length=1.2, start=0.4)),
            Lane(
                "another one",
                [
                    Bar(0, 1.6, "weights", "weights"),
                    *row("codes", [f"res. {i}" for i in range(6)], length=1.2, start=1.6),
                ],
            ),
            *(
                Lane(
                    f"warpgroup {g}",
                    turns(
                        2 + 1.2 * g,
                        [
                            ("products", 1.8, f"tile {g}"),
                            ("codes", 1.8, "add, round"),
                            ("products", 1.8, f"tile {g + 3}"),
                            ("codes", 1.8, "add, round"),
                        ],
                    ),
                )
                for g in range(3)
            ),
        ],
    ),
    "image": Family(
        "image: a patch of the picture, four bytes a pixel",
        "For a network's first layer. A block reads the patch of the image that 8 x 16 outputs need, and "
        "keeps it in shared memory with 4 bytes a pixel, whatever its channels; floats are quantized on "
        "the way, so that no quantized image ever lies in memory. A row of a window is then 32 bytes in a "
        "row, one step of a product: as many steps as the window has rows. This is how float planes go on "
        "Hopper; elsewhere there is one patch, which is made, then multiplied.",
        "shared memory of a block",
        [
            Group(
                "rows of taps: 8 taps of 4 channels each",
                [Cell(f"row {i}", "weights", 0.8) for i in range(4)],
            ),
            Group(
                "one is multiplied, one is made",
                [Cell("patch i", "pixels", 2), Cell("patch i + 1", "pixels", 2)],
            ),
        ],
        [
            Lane(
                "floats arrive",
                [
                    *row("pixels", ["tile 0", "tile 1"], length=1.4),
                    *row("pixels", ["tile 2", "tile 3"], start=4, length=1.4, gap=1.8),
                ],
            ),
            Lane(
                "Tensor Cores",
                row("products", ["tile 0", "tile 1", "tile 2"], start=2.7, length=1.9, gap=1.3),
            ),
            Lane(
                "meanwhile",
                [
                    Bar(1.4, 1.3, "codes", "patch 0"),
                    *row("codes", ["patch 1", "patch 2", "patch 3"], start=2.7, length=1.3, gap=1.9),
                ],
            ),
            Lane("round, store", row("codes", ["tile 0", "tile 1"], start=4.6, length=1.3, gap=1.9)),
        ],
    ),
    "vector": Family(
        "vector: few rows, the weights fetched before the kernel's turn",
        "For a classifier's last layer, up to 16 rows. A block makes eight channels of all rows; its "
        "eight warps share out K. Weights go into registers while the kernel before still runs; what "
        "remains is one round trip for the rows, and the sum over the warps through shared memory.",
        "K of a block's eight channels, in the registers of its warps",
        [Group("2048 bytes of K at once", [Cell(f"warp {i}", "weights") for i in range(8)])],
        [
            Lane("the kernel before", [Bar(0, 5, "idle", "still runs")]),
            Lane("fetch", [Bar(1.2, 3, "weights", "weights"), Bar(5, 2, "pixels", "rows")]),
            Lane("warps multiply", [Bar(7, 1.6, "products", "mma.sync")]),
            Lane(
                "all threads", [Bar(8.6, 1.7, "codes", "add 8 sums"), Bar(10.3, 1.7, "codes", "round, store")]
            ),
        ],
    ),
    "depthwise": Family(
        "depthwise: four columns of a channel in one word",
        "A thread makes four neighbouring channels of four pixels in a row; of two where windows are two "
        "pixels apart, of one where they are neither 3 nor 5 wide and high. Four columns of a row are four "
        "words of a byte a channel; turned around in registers, each word holds the four columns of one "
        "channel, which one dp4a multiplies with as many taps. Weights and constants are in registers "
        "before the kernel's turn, all pixels that a thread reads are fetched at once, and nothing goes "
        "through shared memory.",
        "registers of a thread: four columns of four channels, before and after",
        [
            Group("as fetched: four channels each", [Cell(f"col. {i}", "pixels") for i in range(4)]),
            Group("turned: four columns each", [Cell(f"chan. {i}", "products") for i in range(4)]),
        ],
        [
            Lane("the kernel before", [Bar(0, 5, "idle", "still runs")]),
            Lane("a thread fetches", [Bar(1.2, 3, "weights", "weights"), Bar(5, 2, "pixels", "all rows")]),
            Lane("turns", [*row("pixels", ["row 0", "row 1", "row 2"], start=7, length=0.8, gap=0.4)]),
            Lane("dp4a", [*row("products", ["row 0", "row 1", "row 2"], start=7.8, length=0.8, gap=0.4)]),
            Lane("round, store", [Bar(11.0, 1.4, "codes", "16 codes")]),
        ],
    ),
    "plain": Family(
        "plain: one thread, one output",
        "The GPU's own reference: it computes every node, with zero points, padding and bits as the node "
        "has them. A thread walks over the taps inside the image and over their channels, four at a time.",
        "one output of one thread",
        [
            Group(
                "tap 0", [Cell("ch. 0..3", "pixels"), Cell("ch. 4..7", "pixels"), Cell("...", "pixels", 0.5)]
            ),
            Group(
                "tap 1", [Cell("ch. 0..3", "pixels"), Cell("ch. 4..7", "pixels"), Cell("...", "pixels", 0.5)]
            ),
            Group("", [Cell("...", "pixels", 0.5)]),
        ],
        [
            Lane(
                "a thread", [*row("products", ["dp4a"] * 7, length=1.4), Bar(9.8, 2, "codes", "round, store")]
            ),
            Lane(
                "its neighbour",
                [*row("products", ["dp4a"] * 7, length=1.4), Bar(9.8, 2, "codes", "round, store")],
            ),
        ],
    ),
    "chain": Family(
        "chain: what the first layer makes is multiplied again where it lies",
        "Two 1x1 layers in one launch: y, the codes of the first, and z, those of the second. A block "
        "keeps the weights of both and stays for many tiles of 64 pixels; y is stored for the rest of the "
        "network and at once read from shared memory for z. Tiles belong to teams, which wait for each "
        "other nowhere. `chain_2x2_cluster4`: 2 teams of 2 warpgroups; 4 blocks of a cluster share tiles, "
        "each makes some channels of y and sends them to the others. Where windows of few channels make "
        "what the first one reads, as in a bottleneck, they are a part of the kernel: a tile is then rows of "
        "an image, the patch that its windows read lies beside it, and what they make is no tensor.",
        "shared memory of a block: boxes of 64 pixels and 64 channels",
        [
            Group("fetched once", [Cell("weights y", "weights", 1.3), Cell("weights z", "weights", 1.3)]),
            *(
                Group(
                    f"team {i}",
                    [Cell("x", "pixels", 0.6), Cell("res., y", "codes", 1.2), Cell("z", "codes", 0.6)],
                )
                for i in range(2)
            ),
        ],
        [
            Lane(
                "fetch",
                [
                    Bar(0, 1.4, "weights", "weights"),
                    *row("pixels", ["x 0", "x 1"], start=1.4, length=0.8),
                    Bar(4.9, 0.8, "pixels", "x 2"),
                    Bar(6.2, 0.8, "pixels", "x 3"),
                ],
            ),
            Lane(
                "fetch residuals",
                [
                    *row("codes", ["res. 0", "res. 1"], start=1.4, length=0.9),
                    Bar(6.2, 0.9, "codes", "res. 2"),
                    Bar(7.5, 0.9, "codes", "res. 3"),
                ],
            ),
            Lane(
                "team 0",
                turns(
                    2.2,
                    [
                        ("products", 1.3, "x to y"),
                        ("codes", 1.4, "round y"),
                        ("products", 1.3, "y to z"),
                        ("codes", 1.4, "round z"),
                        ("products", 1.3, "x to y"),
                        ("codes", 1.4, "round y"),
                    ],
                ),
            ),
            Lane(
                "team 1",
                turns(
                    3.5,
                    [
                        ("products", 1.3, "x to y"),
                        ("codes", 1.4, "round y"),
                        ("products", 1.3, "y to z"),
                        ("codes", 1.4, "round z"),
                        ("products", 1.3, "x to y"),
                    ],
                ),
            ),
            Lane(
                "store",
                [
                    Bar(4.9, 0.9, "codes", "y 0"),
                    Bar(6.2, 0.9, "codes", "y 1"),
                    Bar(7.6, 0.9, "codes", "z 0"),
                    Bar(8.9, 0.9, "codes", "z 1"),
                ],
            ),
        ],
    ),
    "pair": Family(
        "pair: a shortcut's layer and the one that adds it, in one ring",
        "Where a residual block adds its shortcut: the first product's codes are the residuals of the "
        "second and never leave the block. Tiles of both products go through one ring of stages without a "
        "pause, and on to the block's next tile. `pair_64x64_stages4_kept`: 64 pixels by 64 channels; all "
        "weights stay in shared memory, the stages hold pixels alone.",
        "shared memory of a block",
        [
            *(
                Group(f"stage {i}", [Cell("pixels", "pixels", 1.1), Cell("weights", "weights", 1)])
                for i in range(3)
            ),
            Group("", [Cell("codes", "codes", 1.1)]),
        ],
        [
            Lane(
                "a thread fetches",
                [
                    *row("pixels", ["a 0", "a 1", "b 0", "b 1", "a 0"], length=1.2),
                    Bar(6.2, 1.2, "pixels", "a 1"),
                    Bar(7.4, 1.2, "pixels", "b 0"),
                    Bar(10.4, 1.2, "pixels", "b 1"),
                ],
            ),
            Lane(
                "warpgroups",
                turns(
                    1.4,
                    [
                        ("products", 2.2, "product a"),
                        ("codes", 1.4, "round a"),
                        ("products", 2.2, "product b"),
                        ("codes", 2.0, "add to a, round"),
                        ("products", 2.2, "a of the next"),
                    ],
                ),
            ),
            Lane("store", [Bar(9.2, 1.2, "codes", "codes")]),
        ],
    ),
    "bit_pair": Family(
        "bit_pair: a shortcut's layer and the one that adds it, on planes of bits",
        "Two 1x1 layers of 1 or 2 bits, either maybe with a stride. A block keeps the "
        "weights of both and fetches a patch of both inputs, as `bits` does. A product's sums become the "
        "bits of its codes, 32 of a plane in a register: those of both meet there. "
        "`bit_pair_128x128_stages2`: 128 pixels by 128 channels, the next patch comes while one is "
        "multiplied.",
        "shared memory of a block",
        [
            Group("fetched once", [Cell("bits of a", "weights", 1.2), Cell("bits of b", "weights", 1.2)]),
            *(Group(f"patch {i}", [Cell("of a", "pixels"), Cell("of b", "pixels")]) for i in range(2)),
        ],
        [
            Lane("a warp fetches", row("pixels", ["patch 0", "patch 1"], length=1.6)),
            *(
                Lane(
                    f"warpgroup {i}",
                    turns(
                        1.6,
                        [
                            ("products", 1.6, "product a"),
                            ("codes", 1.2, "signs"),
                            ("products", 1.6, "product b"),
                            ("codes", 1.6, "signs, store"),
                            ("products", 1.6, "of the next"),
                        ],
                    ),
                )
                for i in range(2)
            ),
        ],
    ),
    "affined": Family(
        "affined: codes are normalized on their way into the product",
        "All codes of a block are fetched into shared memory at once; weights and lines are there before. A "
        "thread puts what the lines make of its chunks of 16 codes in their place, where wgmma reads them. "
        "Behind a Concat a chunk comes from one of its tensors, and what its line makes of it is stored once."
        " `affined_64x32_stages2_producers_cluster4`: 64 pixels by 32 channels, two tiles of 128 channels of "
        "the input in each of four blocks of a cluster, which add up their sums; a second warpgroup rounds "
        "half of the codes.",
        "shared memory of a block",
        [
            *(
                Group(
                    f"tile {i}",
                    [
                        Cell("codes", "pixels", 1.1),
                        Cell("weights", "weights", 1),
                        Cell("lines", "weights", 0.7),
                    ],
                )
                for i in range(2)
            ),
        ],
        [
            Lane("a thread fetches", row("weights", ["weights 0", "weights 1"], length=1.4)),
            Lane("threads fetch", row("pixels", ["codes 0", "codes 1"], start=2.8, length=1.3)),
            Lane(
                "threads round",
                [Bar(4.1, 1.8, "codes", "round 0"), Bar(5.9, 1.8, "codes", "round 1")],
            ),
            Lane("wgmma", [Bar(5.9, 1.4, "products", "product 0"), Bar(7.7, 1.4, "products", "product 1")]),
            Lane("sums", [Bar(9.1, 1.4, "products", "exchange"), Bar(10.5, 2, "codes", "round, store")]),
        ],
    ),
    "conv_pool": Family(
        "conv_pool: the first layer and its max pooling, row by row",
        "A block makes 28 columns of pooled pixels and walks down a strip of rows (`conv_pool_strips4`: "
        "four strips an image). The image is quantized once, into cells of 2 x 2 pixels; a window lies in "
        "4 x 4 of them. The largest of a pooling window's sums is kept in registers, and it alone is "
        "rounded.",
        "shared memory of a block: a double row of cells is what a row of pooled pixels needs anew",
        [
            Group("fetched once", [Cell("weights", "weights", 1.3)]),
            Group("floats on their way", [Cell(f"r + {i}", "pixels", 0.8) for i in (3, 4, 5)]),
            Group("double rows of cells", [Cell(f"r + {i}" if i else "r", "codes", 0.9) for i in range(4)]),
        ],
        [
            Lane(
                "floats arrive",
                turns(0, [("pixels", 4.5, "double row r + 5"), ("pixels", 5, "double row r + 6")]),
            ),
            Lane(
                "Tensor Cores",
                [
                    *row("products", ["sums of 2 r + 1", "2 r + 2"], length=2, gap=0.5),
                    *row("products", ["2 r + 3", "2 r + 4"], start=5, length=2, gap=0.5),
                ],
            ),
            Lane(
                "meanwhile",
                [
                    *row("codes", ["store row r - 1", "cells r + 3"], length=2, gap=0.5),
                    *row("codes", ["store row r", "cells r + 4"], start=5, length=2, gap=0.5),
                ],
            ),
            Lane("keep the largest", row("idle", ["max"] * 4, start=2, length=0.5, gap=2)),
        ],
    ),
}
"""Row -> its family."""

PLACES = (
    "The line of places, which `windows` shares: rows of the image stand one behind the other with the "
    "padding between them, so that what a tap sees of a tile is one operand."
)


class Drawing:
    """Elements of an SVG, from the top down."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.y = 0.0

    def text(self, x: float, y: float, text: str, *, style: str = "", anchor: str = "start") -> None:
        """A line of text."""
        attributes = f' class="{style}"' if style else ""
        anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.elements.append(f'<text x="{x:g}" y="{y:g}"{attributes}{anchored}>{html.escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, text: str = "") -> None:
        """A colored box with a text in it.

        Raises:
            ValueError: The text is wider than the box.
        """
        if len(text) * CHARACTER * SMALL > width - 2:
            raise ValueError(f"'{text}' does not fit {width:.0f} pixels")
        x, width = round(x, 1), round(width, 1)
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>'
        )
        if text:
            self.text(round(x + width / 2, 1), y + height / 2 + 4, text, style="small", anchor="middle")


def draw(family: Family) -> str:
    """The SVG."""
    d = Drawing()
    y = MARGIN + 14
    d.text(MARGIN, y, family.title, style="title")
    y += 26
    d.text(MARGIN, y, family.memory, style="faint")
    y += 8
    _draw_memory(d, family.groups, y)
    y += 30 + (20 if any(group.name for group in family.groups) else 0) + 22
    d.text(MARGIN, y, "in time, from left to right", style="faint")
    y += 8
    _draw_lanes(d, family.lanes, y)
    y += 26 * len(family.lanes) + 8
    return _svg(d, y, family.title, legend=True)


def _draw_memory(d: Drawing, groups: Sequence[Group], y: float) -> None:
    between, inner = 8, 2
    total = sum(cell.width for group in groups for cell in group.cells)
    cells = sum(len(group.cells) - 1 for group in groups)
    unit = (ROOM - between * (len(groups) - 1) - inner * cells) / total
    x = float(MARGIN)
    for group in groups:
        first = x
        for cell in group.cells:
            d.box(x, y, cell.width * unit, 30, cell.kind, cell.text)
            x += cell.width * unit + inner
        x -= inner
        if group.name:
            if len(group.name) * CHARACTER * SMALL > x - first + between:
                raise ValueError(f"'{group.name}' does not fit its {x - first:.0f} pixels")
            d.text(round((first + x) / 2, 1), y + 44, group.name, style="name", anchor="middle")
        x += between


def _draw_lanes(d: Drawing, lanes: Sequence[Lane], y: float) -> None:
    end = max(bar.start + bar.length for lane in lanes for bar in lane.bars)
    unit = (ROOM - LABEL) / end
    for lane in lanes:
        d.text(MARGIN, y + 15, lane.name, style="small")
        for bar in lane.bars:
            d.box(MARGIN + LABEL + bar.start * unit, y, bar.length * unit - 1.5, 22, bar.kind, bar.text)
        y += 26


def places() -> str:
    """The line of places of halo and windows."""
    d = Drawing()
    y = MARGIN + 14
    d.text(
        MARGIN,
        y,
        "The line of places: rows of an image with their padding, one behind the other",
        style="title",
    )
    y += 22
    d.text(MARGIN, y, "an image of 5 columns, windows 3 x 3: a row has a pitch of 6 places", style="faint")
    pitch, rows, size = 6, 4, 30
    y += 12
    x0 = MARGIN
    for i in range(pitch * rows):
        line, column = divmod(i, pitch)
        kind, text = ("idle", "0") if column == 0 else ("pixels", f"{line},{column - 1}")
        d.box(x0 + i * size, y, size - 2, 26, kind, text)
    taps = [("tap (0, 0)", 0), ("tap (0, 1)", 1), ("tap (1, 0)", pitch), ("tap (2, 2)", 2 * pitch + 2)]
    y += 34
    tile = 8
    for name, shift in taps:
        d.box(x0 + shift * size, y, tile * size - 2, 20, "products", name)
        y += 23
    y += 15
    d.text(
        MARGIN,
        y,
        "A tile, here of 8 places, there of 64, is one operand for each tap: the same rows of shared",
        style="small",
    )
    y += 16
    d.text(
        MARGIN,
        y,
        "memory, further by a constant. Places in the padding make outputs that nobody stores.",
        style="small",
    )
    return _svg(d, y + 4, "The line of places of halo and windows", legend=False)


def _svg(d: Drawing, y: float, title: str, *, legend: bool) -> str:
    if legend:
        x = float(MARGIN + LABEL)
        y += 4
        for kind in KINDS:
            d.elements.append(f'<rect x="{x:g}" y="{y:g}" width="12" height="12" rx="2" class="{kind}"/>')
            name = {"products": "products (Tensor Cores, dp4a)", "codes": "codes, residuals"}.get(kind, kind)
            d.text(x + 17, y + 10, name, style="name")
            x += 17 + len(name) * CHARACTER * SMALL + 22
        y += 12
    height = y + MARGIN

    def rules(theme: int) -> str:
        filled = [*KINDS, "idle"]
        text = [f"text{{fill:{COLORS['text'][theme]}}}", f".faint,.name{{fill:{COLORS['faint'][theme]}}}"]
        text += [f".{kind}{{fill:{COLORS[kind][theme]}}}" for kind in filled]
        text += [f".ground{{fill:{COLORS['ground'][theme]};stroke:{COLORS['edge'][theme]}}}"]
        return "".join(text)

    fonts = f".title{{font-weight:600}}.faint{{font-size:12px}}.small,.name{{font-size:{SMALL}px}}"
    style = f"{fonts}{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}"
    body = "\n".join(d.elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'font-family="system-ui, sans-serif" font-size="{FONT}" role="img">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n"
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" class="ground"/>\n'
        f"{body}\n</svg>\n"
    )


def pictures() -> dict[str, str]:
    """File name, without its suffix -> SVG."""
    return {"kernel-places": places()} | {f"kernel-{name}": draw(family) for name, family in FAMILIES.items()}
