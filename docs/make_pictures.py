"""Draws the pictures of masks that the documentation shows: `python docs/make_pictures.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from jax_magi import AttentionMask, MaskType

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


def main() -> None:
  """Draws all pictures."""
  IMAGES.mkdir(exist_ok=True)
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
