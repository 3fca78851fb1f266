#!/usr/bin/env python3
"""Draws docs/figures/kivi.svg from kivi_codes.json, which `kivi_codes SAMPLE > docs/figures/kivi_codes.json` prints.

Rows are tokens, columns channels. A frame is a group: the values that share a scale and a minimum.
"""
import json
import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

FOLDER = pathlib.Path(__file__).parent
INK, RESIDUAL = "#1c2b39", "#f6c667"
SHADES = ["#eaf2f8", "#b8d4e8", "#7fb0d6", "#3f86bd"]
GAP = 0.06


def cell(axes, column, row, color, text, dark):
    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor="white", linewidth=0.8))
    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=6.5, color="white" if dark else INK)


def frame(axes, column, row, width, height):
    size = (width - 2 * GAP, height - 2 * GAP)
    axes.add_patch(Rectangle((column + GAP, row + GAP), *size, fill=False, edgecolor=INK, linewidth=1.1))


def draw(axes, tensor, group, vertical, title):
    codes, residual = tensor["codes"], tensor["residual"]
    channels = len((codes or residual)[0])
    for row, values in enumerate(codes):
        for column, code in enumerate(values):
            cell(axes, column, row, SHADES[code], str(code), code == 3)
    for row, values in enumerate(residual, len(codes)):
        for column, value in enumerate(values):
            cell(axes, column, row, RESIDUAL, f"{value:.2g}", False)
    width, height = (1, group) if vertical else (group, 1)
    for row in range(0, len(codes), height):
        for column in range(0, channels, width):
            frame(axes, column, row, width, height)
    outline = Rectangle((0, len(codes)), channels, len(residual), fill=False, edgecolor="#a05a00", linewidth=2)
    axes.add_patch(outline)
    axes.text(channels + 0.2, len(codes) + len(residual) / 2, "residual,\nsource\nprecision", va="center", fontsize=7)
    axes.set_title(title, fontsize=9, color=INK)
    axes.set_xlim(-0.1, channels + 2.4)
    axes.set_ylim(len(codes) + len(residual) + 0.1, -0.1)
    axes.set_aspect("equal")
    axes.set_yticks([i + 0.5 for i in range(len(codes) + len(residual))], range(len(codes) + len(residual)), fontsize=6)
    axes.set_xticks([i + 0.5 for i in range(channels)], range(channels), fontsize=6)
    axes.set_xlabel("channel", fontsize=7)
    axes.set_ylabel("token", fontsize=7)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def main():
    held = json.loads((FOLDER / "kivi_codes.json").read_text())
    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "kvtier"  # the same drawing gives the same file
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 5.2))
    draw(left, held["k"], held["group"], True, "K: a group is 4 tokens of one channel")
    draw(right, held["v"], held["group"], False, "V: a group is 4 channels of one token")
    figure.tight_layout()
    figure.savefig(FOLDER / "kivi.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
