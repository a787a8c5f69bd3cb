// Draws the charts of a page, keeps their settings in the page's address, and shows their data.
"use strict";

(() => {
  // In pixels: below this width charts side by side go one under the other, and legends too; what axes and labels take
  // beside the plot then; how far the label at an axis' end hangs over it; and the least width that a plot keeps.
  const PHONE = 500;
  const MARGIN = 90;
  const OVERHANG = 12;
  const LEAST = 150;

  const bound = (spec) => (spec.params || []).filter((param) => param.bind && param.bind.input);

  // --- settings in the address: ?<chart>.<param>=<value>, for values that are not the chart's own ---

  function allowed(param, text) {
    const { input, options, min, max } = param.bind;
    if (options) return options.find((option) => String(option) === text);
    if (input === "checkbox") return text === "true" ? true : text === "false" ? false : undefined;
    if (input === "range" || input === "number" || typeof param.value === "number") {
      const value = Number(text);
      return text !== "" && Number.isFinite(value) && !(value < min) && !(value > max) ? value : undefined;
    }
    return text;
  }

  function restore(chart, params) {
    const query = new URLSearchParams(location.search);
    for (const param of params) {
      const text = query.get(`${chart.id}.${param.name}`);
      const value = text === null ? undefined : allowed(param, text);
      if (value !== undefined) param.value = value;
    }
  }

  const pending = new Map();
  let timer = 0;

  function remember(key, value, initial) {
    pending.set(key, value === initial ? null : String(value));
    clearTimeout(timer);
    timer = setTimeout(() => {
      const query = new URLSearchParams(location.search);
      for (const [name, text] of pending) text === null ? query.delete(name) : query.set(name, text);
      pending.clear();
      const search = query.toString();
      try {
        history.replaceState(history.state, "", location.pathname + (search ? `?${search}` : "") + location.hash);
      } catch {
        // Some browsers forbid this to pages opened from a file; the chart works all the same.
      }
    }, 150);
  }

  // --- narrow screens ---

  function oneColumnLegends(part) {
    if (part === null || typeof part !== "object") return;
    if (part.legend && part.legend.columns) part.legend.columns = 1;
    Object.values(part).forEach(oneColumnLegends);
  }

  // Columns become rows, and everything with a width of its own gives up what does not fit.
  function fit(chart, spec, room) {
    let excess = Number(chart.dataset.width) - room;
    if (excess <= 0) return;
    if (room < PHONE) {
      oneColumnLegends(spec);
      spec.config.legend = { ...spec.config.legend, layout: { top: { anchor: "start", direction: "vertical", margin: 4 } } };
    }
    if (spec.hconcat && room < PHONE) {
      spec.vconcat = spec.hconcat;
      delete spec.hconcat;
      excess = Math.max(...spec.vconcat.map((part) => (part.width || 0) + MARGIN)) - room;
    }
    shrink(spec, excess + OVERHANG);
  }

  function shrink(spec, excess) {
    for (const part of spec.vconcat || [spec.spec || spec]) {
      if (typeof part.width === "number") part.width = Math.min(part.width, Math.max(LEAST, part.width - excess));
    }
  }

  // --- data as a table and as CSV ---

  const HELPERS = /^_|^id$|_(start|end|sort_index)$/; // columns that Vega-Lite adds for itself

  function datasetNames(marks, found = new Set()) {
    for (const mark of marks || []) {
      if (mark.from && mark.from.data) found.add(mark.from.data);
      if (mark.from && mark.from.facet) found.add(mark.from.facet.data);
      datasetNames(mark.marks, found);
    }
    return found;
  }

  // Every distinct set of rows that marks are drawn from, as the chart stands now.
  function shownTables({ view, vgSpec }) {
    const tables = new Map();
    for (const name of datasetNames(vgSpec.marks)) {
      let rows;
      try {
        rows = view.data(name);
      } catch {
        continue; // lives inside a facet, whose whole data is in the list as well
      }
      const fields = rows.length ? Object.keys(rows[0]).filter((field) => !HELPERS.test(field)) : [];
      if (!fields.length) continue;
      const table = { fields, rows: rows.map((row) => fields.map((field) => exact(row[field]))) };
      tables.set(JSON.stringify(table), table);
    }
    return [...tables.values()];
  }

  // Twelve digits: past them stands what floating point has left over.
  const exact = (value) => (typeof value === "number" ? Number(value.toPrecision(12)) : value);

  const csvCell = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));

  function readable(value) {
    if (value === null || value === undefined) return "";
    return typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 6 }) : String(value);
  }

  function element(name, text, attributes = {}) {
    const made = Object.assign(document.createElement(name), attributes);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function showData(chart, result) {
    const place = chart.querySelector(".laga-data > div");
    const parts = shownTables(result).map(({ fields, rows }, index) => {
      const csv = [fields, ...rows].map((row) => row.map(csvCell).join(",")).join("\n");
      const link = element("a", "Download as CSV", {
        href: URL.createObjectURL(new Blob([csv + "\n"], { type: "text/csv" })),
        download: `${chart.id}${index ? `-${index + 1}` : ""}.csv`,
      });
      const table = element("table");
      const head = table.createTHead().insertRow();
      const kinds = fields.map((_, column) => (typeof rows[0][column] === "number" ? "number" : ""));
      fields.forEach((field, column) => head.append(element("th", field, { scope: "col", className: kinds[column] })));
      const body = table.createTBody();
      for (const row of rows.slice(0, 500)) {
        const line = body.insertRow();
        row.forEach((value, column) => line.append(element("td", readable(value), { className: kinds[column] })));
      }
      const box = element("div", undefined, { className: "laga-table", tabIndex: 0 });
      box.append(table);
      const part = element("div");
      part.append(link, box);
      if (rows.length > 500) part.append(element("p", `The first 500 of ${rows.length} rows; the CSV has all.`));
      return part;
    });
    for (const old of place.querySelectorAll("a")) URL.revokeObjectURL(old.href);
    place.replaceChildren(...parts);
  }

  // --- the answer of a chart that recommends a row of its data: why, and code to copy ---

  function keepAnswer(chart, { view, vgSpec }) {
    const answer = chart.querySelector(".laga-answer");
    if (!answer) return;
    const recommended = (rows) => rows.find((row) => row.recommended);
    const name = [...datasetNames(vgSpec.marks)].find((each) => recommended(view.data(each)));
    const tell = (rows) => {
      const { why, code } = recommended(rows);
      answer.querySelector("p").textContent = why;
      answer.querySelector("pre").textContent = code;
    };
    tell(view.data(name));
    view.addDataListener(name, (_, rows) => tell(rows));
  }

  // --- one chart ---

  async function draw(chart) {
    const plot = chart.querySelector(".laga-plot");
    const controls = chart.querySelector(".laga-controls");
    const details = chart.querySelector(".laga-data");
    const spec = JSON.parse(chart.querySelector("script").textContent);
    const params = bound(spec);
    const initial = new Map(params.map((param) => [param.name, param.value]));
    restore(chart, params);
    fit(chart, spec, plot.clientWidth);
    const staged = element("div"); // the inputs gather here, so that they take their places at once
    const options = {
      mode: "vega-lite",
      renderer: "svg",
      actions: false,
      defaultStyle: false,
      bind: staged,
      tooltip: { theme: "laga" },
    };
    let result = await vegaEmbed(plot, spec, options);
    const cut = plot.scrollWidth - plot.clientWidth; // long labels can take more than is known before they are drawn
    if (cut > 1) {
      result.finalize();
      staged.replaceChildren();
      shrink(spec, cut);
      result = await vegaEmbed(plot, spec, options);
    }
    // Radio buttons of one name exclude each other in the whole page: each chart's get a name of their own.
    for (const radio of staged.querySelectorAll("input[type=radio]")) radio.name = `${chart.id}.${radio.name}`;
    const places = [...controls.children];
    const rows = [...staged.querySelectorAll(".vega-bind")];
    rows.forEach((row, index) => places[index] && row.classList.add(...places[index].classList));
    controls.replaceChildren(...rows);
    for (const { name } of params) {
      result.view.addSignalListener(name, (_, value) => {
        remember(`${chart.id}.${name}`, value, initial.get(name));
        if (details.open) requestAnimationFrame(() => showData(chart, result));
      });
    }
    keepAnswer(chart, result);
    details.addEventListener("toggle", () => details.open && showData(chart, result));
    if (details.open) showData(chart, result);
    chart.dataset.state = "live";
  }

  for (const chart of document.querySelectorAll(".laga-chart")) {
    draw(chart).catch((error) => {
      chart.dataset.state = "failed";
      console.error(`chart ${chart.id}:`, error);
    });
  }
})();
