"""Rows of an experiment as a table in a notebook and in the book."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_UNITS = {"mb": "MB", "gb": "GB", "ms": "ms"}


class table:
    """Show ``rows`` (mappings with the same keys), each value by the format given for its key, or as it is.

    A key that ends in a unit, as ``peak_mb``, is headed "peak, MB". ``names`` heads a column otherwise.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], names: Mapping[str, str] | None = None, **formats: str
    ) -> None:
        self.rows, self.names, self.formats = rows, names or {}, formats
        if rows and (unknown := set(formats) - set(rows[0])):
            raise ValueError(f"no column {', '.join(sorted(unknown))}; there are {', '.join(rows[0])}")

    def _repr_html_(self) -> str:
        columns = list(self.rows[0]) if self.rows else []
        head = "".join(f"<th>{html.escape(self._heading(column))}</th>" for column in columns)
        body = "".join(
            f"<tr>{''.join(self._cell(row[column], column) for column in columns)}</tr>" for row in self.rows
        )
        return f'<table class="laga-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    def _heading(self, column: str) -> str:
        if column in self.names:
            return self.names[column]
        *words, last = column.split("_")
        if words and last in _UNITS:
            return f"{' '.join(words)}, {_UNITS[last]}"
        return column.replace("_", " ")

    def _cell(self, value: Any, column: str) -> str:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is None:
            text = "–"
        elif number:
            text = self.formats.get(column, "{:,}" if isinstance(value, int) else "{:g}").format(value)
        else:
            text = str(value)  # a word among numbers, such as OOM, has no use for their format
        align = ' style="text-align: right"' if number or value is None else ""
        return f"<td{align}>{html.escape(text)}</td>"
