"""Draws the documentation's pictures of masks and plans: `python docs/make_pictures.py`."""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from jax_magi import AttentionMask, MaskType, magi_attn_varlen_key

IMAGES = Path(__file__).parent / "images"


def _draw(name: str, masks: dict[str, AttentionMask], num_columns: int) -> None:
  num_rows = -(-len(masks) // num_columns)
  size = (2.6 * num_columns, 2.75 * num_rows)
  figure, axes = plt.subplots(num_rows, num_columns, figsize=size, layout="constrained")
  for ax, (title, mask) in zip(axes.flat, masks.items(), strict=True):
    mask.plot(ax, title=title)
    ax.title.set_fontsize(9)
    ax.set(xticks=[], yticks=[])
  figure.savefig(IMAGES / name, dpi=110)


def _draw_gallery() -> None:
  """The masks of masks.md: each picture shows the `mask` of the block before it."""
  text = (IMAGES.parent / "masks.md").read_text()
  (IMAGES / "masks").mkdir(exist_ok=True)
  namespace: dict = {}
  pieces = (
    r"^<!-- setup\n(.*?)^-->$|^```python\n(.*?)^```$|^!\[[^\]]*\]\((images/masks/\w+\.png)\)$"
  )
  for setup, code, picture in re.findall(pieces, text, re.MULTILINE | re.DOTALL):
    if not picture:
      exec(setup or code, namespace)
      continue
    figure, ax = plt.subplots(figsize=(2.6, 2.6), layout="constrained")
    namespace["mask"].plot(ax)
    ax.set(xticks=[], yticks=[])
    figure.savefig(IMAGES.parent / picture, dpi=110)
    plt.close(figure)


def _draw_cover() -> None:
  """Slices that `from_dense` finds, a color for each."""
  i, j = np.indices((96, 96))
  random = np.random.default_rng(3)
  masks = {
    "blocks of different sizes": (j <= i)
    & (np.digitize(i, [20, 32, 70]) == np.digitize(j, [20, 32, 70])),
    "window + first tokens": (j <= i) & ((i - j < 18) | (j < 6)),
    "dilated blocks": (j <= i) & ((i // 12 - j // 12) % 2 == 0),
    "random blocks": np.kron(random.random((8, 8)) < 0.4, np.ones((12, 12))).astype(bool),
  }
  figure, axes = plt.subplots(1, 4, figsize=(10.4, 2.9), layout="constrained")
  for ax, (title, dense) in zip(axes, masks.items(), strict=True):
    slices = AttentionMask.from_dense(dense).slices
    numbers = np.full(dense.shape, np.nan)
    for number, one in enumerate(slices):
      shown = np.asarray(AttentionMask(one[None], *dense.shape).to_dense())
      numbers[shown] = number % 10
    ax.imshow(numbers, cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
    ax.set_title(f"{title}: {len(slices)} slices", fontsize=9)
    ax.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")
  figure.savefig(IMAGES / "from_dense.png", dpi=110)


def _draw_plan() -> None:
  """A plan of packed documents on eight ranks."""
  documents = [0, 1100, 1400, 6000, 6200, 7100, 8192]
  key = magi_attn_varlen_key(documents, causal=True, cp_size=8, chunk_size=64)
  axes = key.plot()
  for end in documents[1:-1]:
    axes[0].axvline(end, color="black", lw=0.5, ls=":")
  axes[0].figure.savefig(IMAGES / "context_parallel_plan.png", dpi=110)


def _draw_stages() -> None:
  """What a rank does over time, with three transfers."""
  figure, ax = plt.subplots(figsize=(9, 2.2), layout="constrained")

  def bar(row, begin, length, text, color):
    ax.broken_barh([(begin, length)], (row - 0.38, 0.76), facecolors=color, edgecolor="white")
    ax.text(begin + length / 2, row, text, ha="center", va="center", fontsize=7)

  colors = plt.get_cmap("Pastel1").colors
  for i in range(3):
    bar(1, 2.0 * i, 2.0, f"k, v of transfer {i + 1}", colors[1])
    bar(0, 2.2 + 2.1 * i, 2.0, f"stage {i + 1}", colors[2])
  bar(0, 0.0, 2.1, "stage 0: own keys", colors[0])
  bar(0, 8.4, 0.6, "merge", colors[4])
  ax.set(yticks=[0, 1], yticklabels=["kernels", "links"], xticks=[], xlabel="time, forward pass")
  ax.set(xlim=(0, 9.1), ylim=(1.6, -0.6))
  figure.savefig(IMAGES / "context_parallel_stages.png", dpi=110)


def main() -> None:
  """Draws all pictures."""
  IMAGES.mkdir(exist_ok=True)
  _draw_gallery()
  _draw_plan()
  _draw_stages()
  _draw_cover()
  classic = {}
  for mask_type in map(MaskType, range(4)):
    for q_len, k_len in ((8, 12), (12, 8)):
      mask = AttentionMask.from_ranges([[0, q_len]], [[0, k_len]], [mask_type])
      classic[f"{mask_type.name}, {q_len} x {k_len}"] = mask.crop(0, 12, 0, 12)
  _draw("classic_types.png", classic, num_columns=4)

  ids = np.repeat([1, 2, 3, 0], [40, 22, 50, 16])
  question = AttentionMask.shared_question(30, [25, 40, 33])
  hybrid = AttentionMask.from_ranges([[0, 60]], [[0, 60]], q_len=128, k_len=128)
  hybrid += AttentionMask(np.array([[60, 128, 0, 128, -30, 0]]), 128, 128)
  constructors = {
    "full(128)": AttentionMask.full(128),
    "causal(128)": AttentionMask.causal(128),
    "sliding_window(128, left=24)": AttentionMask.sliding_window(128, left=24),
    "from_segment_ids(..., causal)": AttentionMask.from_segment_ids(ids, 3, causal=True),
    "prefix_lm(40, 128)": AttentionMask.prefix_lm(40, 128),
    "block_causal(24, 128)": AttentionMask.block_causal(24, 128),
    "shared_question(30, [25, 40, 33])": question,
    "full block + window": hybrid,
  }
  _draw("constructors.png", constructors, num_columns=4)


if __name__ == "__main__":
  main()
