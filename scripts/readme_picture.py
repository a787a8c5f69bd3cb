"""Draw the picture of the README, `book/figures/saved.png`, from the chart of the book that it shows."""

from __future__ import annotations

import json
from pathlib import Path

import vl_convert

from laga_core.charts import memory

TARGET = Path(__file__).resolve().parent.parent / "book" / "figures" / "saved.png"


def main() -> None:
    spec = memory.saved().to_dict()
    spec["config"]["background"] = "white"  # a picture has no page to take its colours from
    svg = vl_convert.vegalite_to_svg(json.dumps(spec)).replace("currentColor", "#222")
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_bytes(vl_convert.svg_to_png(svg, scale=2))
    print(TARGET)


if __name__ == "__main__":
    main()
