"""Charts drawn without a browser, their controls set as a reader would set them."""

from __future__ import annotations

import json
import re
from typing import Any

import vl_convert


def drawn(spec: dict[str, Any], **controls: Any) -> tuple[str, list[str]]:
    """The SVG and its texts, after setting controls by name."""
    spec = json.loads(json.dumps(spec))
    for name, value in controls.items():
        param = next(param for param in spec["params"] if param["name"] == name)
        bind = param["bind"]
        assert value in bind["options"] if "options" in bind else bind["min"] <= value <= bind["max"]
        param["value"] = value
    svg = vl_convert.vegalite_to_svg(json.dumps(spec))
    return svg, re.findall(r"<text[^>]*>([^<]*)</text>", svg)
