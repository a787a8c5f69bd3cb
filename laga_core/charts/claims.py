"""The claims ledger as a chart and as a table that filters in the page, without a kernel."""

from __future__ import annotations

import html
import inspect
from collections import Counter
from collections.abc import Iterable, Sequence

import altair as alt

from ..experiments.checks import FAMILIES, REGISTRY
from ..experiments.claims import OPEN, Entry, counts, verdict_table

COLOURS = {
    # Okabe and Ito's, apart from the three that stand for the forms; grey where nothing could be decided
    "reproduced": "#56B4E9",
    "reproduced, another cause": "#E69F00",
    "holds under the paper's convention": "#F0E442",
    "not reproduced": "#CC79A7",
    "needs hardware not at hand": "#999999",
    OPEN: "#DDDDDD",
}


def verdict_chart(entries: Sequence[Entry]) -> alt.Chart:
    """Claims by family, split by verdict; those decided from the paper's own cells alone are paler."""
    tally = Counter(
        (e.claim.family, e.finding.verdict, "the paper's own numbers" if e.finding.kind == "reported" else "our own")
        for e in entries
    )
    order = [verdict for verdict in COLOURS if any(key[1] == verdict for key in tally)]
    rows = [
        {"family": family, "verdict": verdict, "order": order.index(verdict), "decided from": source, "claims": number}
        for (family, verdict, source), number in sorted(tally.items())
    ]
    totals = counts(entries)
    described = ", ".join(f"{totals[verdict]} {verdict}" for verdict in order)
    sources = alt.Scale(domain=["our own", "the paper's own numbers"], range=[1, 0.5])
    return (
        alt.Chart(alt.InlineData(rows), width=560, height=240, description=f"Claims by verdict: {described}.")
        .mark_bar()
        .encode(
            x=alt.X("claims:Q", title="claims", stack="zero"),
            y=alt.Y("family:N", title=None, sort=list(FAMILIES)),
            color=alt.Color(
                "verdict:N", title=None, scale=alt.Scale(domain=order, range=[COLOURS[v] for v in order]),
                legend=alt.Legend(columns=2, labelLimit=260),
            ),
            opacity=alt.Opacity("decided from:O", scale=sources, legend=None),
            order=alt.Order("order:Q"),
            tooltip=["family:N", "verdict:N", "decided from:N", "claims:Q"],
        )
    )  # fmt: skip


class ClaimsTable:
    """Every claim as a row, a folded table for each family, filters above, and below the source of each check.

    What is folded opens for a filter, for a link to a claim, and for a search in the page.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = list(entries)
        self.rows = verdict_table(self.entries)

    def _repr_html_(self) -> str:
        names = sorted({entry.claim.check for entry in self.entries})
        return "\n".join(
            [
                '<section class="laga-claims">',
                f"<style>{_STYLE}</style>",
                f"<p>{self._summary()}</p>",
                self._filters(),
                *(_group(name, rows) for name in FAMILIES if (rows := [r for r in self.rows if r["family"] == name])),
                '<p class="laga-claims-none" hidden>No claim fits these filters.</p>',
                f"<details><summary>The {len(names)} functions that decide, with their source</summary>",
                *map(_source, names),
                "</details>",
                f"<script>{_SCRIPT}</script>",
                "</section>",
            ]
        )

    def _summary(self) -> str:
        tally = counts(self.entries)
        parts = "".join(
            f'<span class="tone{tone}">{tally[verdict]} {html.escape(verdict)}</span> '
            for tone, verdict in enumerate(COLOURS)
            if tally.get(verdict)
        )
        own = sum(entry.finding.kind == "reported" for entry in self.entries)
        compared = f"For {own} of them only the paper's own numbers, or what others publish, were compared."
        return f"{len(self.entries)} claims: {parts}<br>{compared}"

    def _filters(self) -> str:
        tally = counts(self.entries)
        families = Counter(row["family"] for row in self.rows)
        kinds = Counter(row["kind"] for row in self.rows)
        return "".join(
            [
                '<form role="search">',
                _select("verdict", {verdict: tally[verdict] for verdict in tally if tally[verdict]}, len(self.rows)),
                _select(
                    "family", {family: families[family] for family in FAMILIES if families[family]}, len(self.rows)
                ),
                _select("kind", dict(kinds.most_common()), len(self.rows)),
                '<label>words <input type="search" name="words" placeholder="table 5, linear, gradient …"></label>',
                f'<output aria-live="polite">{len(self.rows)} claims</output></form>',
            ]
        )


def _select(name: str, options: dict[str, int], total: int) -> str:
    entries = "".join(
        f'<option value="{html.escape(option)}">{html.escape(option)} ({number})</option>'
        for option, number in options.items()
    )
    return f'<label>{name} <select name="{name}"><option value="">all ({total})</option>{entries}</select></label>'


def _group(family: str, rows: Sequence[dict[str, str]]) -> str:
    """The claims of a family, folded; the summary says how they came out."""
    tally = Counter(row["verdict"] for row in rows)
    found = "".join(
        f'<span class="tone{tone}" title="{html.escape(verdict)}">{tally[verdict]}'
        f'<span class="visually-hidden"> {html.escape(verdict)}</span></span>'
        for tone, verdict in enumerate(COLOURS)
        if tally[verdict]
    )
    return (
        f'<details class="laga-family"><summary><b>{family}</b> <span>{len(rows)} claims</span> {found}'
        '</summary><table><thead><tr><th scope="col">claim</th><th scope="col">paper</th><th scope="col">ours</th>'
        f'<th scope="col">verdict</th></tr></thead><tbody>{"".join(map(_row, rows))}</tbody></table></details>'
    )


def _row(row: dict[str, str]) -> str:
    text = {key: html.escape(value) for key, value in row.items()}
    check = text["decided_by"].rsplit(".", 1)[1]
    remark = f"{_linked(row['remark'])} · " if row["remark"] else ""
    tone = list(COLOURS).index(row["verdict"])
    return (
        f'<tr id="{text["id"]}" data-verdict="{text["verdict"]}" data-family="{text["family"]}"'
        f' data-kind="{text["kind"]}">'
        f"<td>{text['claim']} <small>{text['where']} · <code>{text['id']}</code></small></td>"
        f'<td data-name="paper">{text["paper"]}</td>'
        f'<td data-name="ours">{text["ours"]} <small>{text["kind"]}</small></td>'
        f'<td data-name="verdict"><b class="tone{tone}">{text["verdict"]}</b> '
        f'<small>{remark}decided by <a href="#check-{check}" title="{text["decided_by"]}">{check}</a></small></td></tr>'
    )


def _linked(remark: str) -> str:
    """The remark with its links made links."""
    words = [
        f'<a href="{html.escape(word.rstrip(";,"))}">{html.escape(word.rstrip(";,").rsplit("/", 1)[1])}</a>'
        if word.startswith("https://")
        else html.escape(word)
        for word in remark.split(" ")
    ]
    return " ".join(words)


def _source(name: str) -> str:
    function = REGISTRY[name]
    summary = html.escape((inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").replace("``", ""))
    code = html.escape(inspect.getsource(function).removeprefix("@check\n").rstrip())
    return (
        f'<details id="check-{name}"><summary><code>{function.__module__}.{name}</code> {summary}</summary>'
        f"<pre>{code}</pre></details>"
    )


_STYLE = """
.laga-claims { font-size: 0.875rem; }
html .bd-content div.cell_output .text_html:not(:has(table.dataframe)):has(> .laga-claims) { padding: 0;
  color: inherit; background: transparent; } /* the theme lights outputs up in the dark */
.laga-claims form { display: flex; flex-wrap: wrap; gap: 0.5rem 1.25rem; align-items: center; margin-bottom: 0.75rem; }
.laga-claims label { display: flex; gap: 0.4rem; align-items: center; margin: 0; font-weight: 600; max-width: 100%; }
.laga-claims :is(select, input) { min-width: 0; max-width: 16rem; height: 2rem; padding: 0 0.4rem; font: inherit;
  font-weight: 400; color: inherit; background: var(--pst-color-background, transparent);
  border: 1px solid color-mix(in srgb, currentColor 30%, transparent); border-radius: 4px; }
.laga-claims output { font-variant-numeric: tabular-nums; }
.laga-claims table { width: 100%; border-collapse: collapse; }
.laga-claims :is(th, td) { padding: 0.35rem 0.6rem 0.35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); }
.laga-claims td:nth-child(1) { width: 40%; }
.laga-claims td:nth-child(4) { width: 34%; }
.laga-claims td:is(:nth-child(2), :nth-child(3)) { font-variant-numeric: tabular-nums; }
.laga-claims small { display: block; overflow-wrap: anywhere;
  color: color-mix(in srgb, currentColor 72%, transparent); }
.laga-claims b { font-weight: 600; padding-left: 0.45rem; border-left: 0.3rem solid var(--tone); }
.laga-claims a { overflow-wrap: anywhere; }
.laga-claims pre { overflow-x: auto; font-size: 0.8125rem; padding: 0.5rem; }
.laga-claims summary { cursor: pointer; padding: 0.15rem 0; overflow-wrap: anywhere; }
.laga-claims .laga-family { border-bottom: 1px solid color-mix(in srgb, currentColor 25%, transparent); }
.laga-claims .laga-family > summary { padding: 0.6rem 0; font-variant-numeric: tabular-nums; }
.laga-claims .laga-family > summary > * { display: inline-block; margin-right: 0.75rem; }
.laga-claims .laga-family > summary b { min-width: 8.5em; font-size: 1rem; padding: 0; border: 0; }
.laga-claims span[class^="tone"] { padding-left: 0.35rem; border-left: 0.3rem solid var(--tone); }
.laga-claims p span[class^="tone"] { display: inline-block; margin: 0 0.75rem 0.15rem 0; }
.laga-claims [hidden] { display: none; }
@media (max-width: 600px) {
  .laga-claims thead { position: absolute; clip-path: inset(50%); }
  .laga-claims .laga-family > summary > * { margin-right: 0.5rem; }
  .laga-claims .laga-family > summary b { min-width: 0; }
  .laga-claims tr:not([hidden]) { display: block; padding: 0.5rem 0;
    border-bottom: 1px solid color-mix(in srgb, currentColor 25%, transparent); }
  .laga-claims td:is(*, :nth-child(1), :nth-child(4)) { display: block; width: auto; padding: 0.1rem 0; border: 0; }
  .laga-claims td[data-name]::before { content: attr(data-name) ": "; opacity: 0.72; }
  .laga-claims td small { display: inline; }
  .laga-claims td:first-child small { display: block; }
}
""" + "".join(f".laga-claims .tone{number} {{ --tone: {colour}; }}\n" for number, colour in enumerate(COLOURS.values()))

# Filters combine; their state lives in the page's address, as that of the charts does.
_SCRIPT = """
(() => {
  const root = document.currentScript.closest(".laga-claims");
  const form = root.querySelector("form"), rows = [...root.querySelectorAll("tbody tr")];
  const groups = [...root.querySelectorAll(".laga-family")];
  const fields = ["verdict", "family", "kind", "words"].map((name) => form.elements[name]);
  const text = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const show = () => {
    const words = form.elements.words.value.toLowerCase().split(/\\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const fits = ["verdict", "family", "kind"].every((name) => !form.elements[name].value
        || form.elements[name].value === row.dataset[name]) && words.every((word) => text.get(row).includes(word));
      row.hidden = !fits;
      shown += fits;
    }
    const filtered = fields.some((field) => field.value);
    for (const group of groups) {
      group.hidden = !group.querySelector("tbody tr:not([hidden])");
      if (filtered) group.open = true;
    }
    form.querySelector("output").value = shown === 1 ? "1 claim" : `${shown} claims`;
    root.querySelector(".laga-claims-none").hidden = shown > 0;
  };
  const keep = () => {
    const query = new URLSearchParams(location.search);
    for (const field of fields) {
      const key = `claims.${field.name}`;
      field.value ? query.set(key, field.value) : query.delete(key);
    }
    const search = query.toString();
    try {
      history.replaceState(history.state, "", location.pathname + (search ? `?${search}` : "") + location.hash);
    } catch { /* pages opened from a file may not be allowed to; filtering works all the same */ }
  };
  const query = new URLSearchParams(location.search);
  for (const field of fields) {
    field.value = query.get(`claims.${field.name}`) ?? "";
    if (field.selectedIndex === -1) field.value = "";
  }
  form.addEventListener("input", () => { show(); keep(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  root.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#check-"]');
    for (let at = link && root.querySelector(link.hash); at && at !== root; at = at.parentElement) at.open = true;
  });
  const open = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const group = target && target.closest(".laga-family");
    if (!group || group.open) return;
    group.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", open);
  show();
  open();
})();
"""
