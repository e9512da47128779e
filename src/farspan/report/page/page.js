"use strict";
// Parts of pages: functions that take plain data and return elements. Bytes and seconds are
// numbers. No function reads HTML from data: text stays text.
const farspan = (() => {
  const SVG = "http://www.w3.org/2000/svg"; // a name; nothing is loaded from there

  // -- elements -----------------------------------------------------------------------------------

  // An element with attributes, `on...` handlers, and children: elements, text, or lists of them.
  function make(tag, attributes = {}, ...children) {
    return filled(document.createElement(tag), attributes, children);
  }

  function draw(tag, attributes = {}, ...children) {
    return filled(document.createElementNS(SVG, tag), attributes, children);
  }

  function filled(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value != null) element.setAttribute(name, value);
    }
    element.append(...children.flat(Infinity).filter((child) => child != null && child !== ""));
    return element;
  }

  let made = 0;
  const fresh = (what) => `${what}-${++made}`;

  // -- numbers in words, as farspan.formatting writes them ------------------------------------------

  const grouped = (amount, digits = 0) => amount.toLocaleString("en-US", {
    minimumFractionDigits: digits, maximumFractionDigits: digits, roundingMode: "halfEven",
  });

  const figures = (amount, count = 3) => {
    if (!amount) return "0";
    const whole = Math.floor(Math.log10(Math.abs(amount))) + 1;
    return whole > count ? grouped(amount) : String(Number(amount.toPrecision(count)));
  };

  function bytes(size) {
    if (size == null) return "";
    let amount = size, unit = "B";
    for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
      if (Math.abs(amount) < 1024) break;
      amount /= 1024;
      unit = larger;
    }
    return `${grouped(amount, unit === "B" ? 0 : 1)} ${unit}`;
  }

  function seconds(time) {
    if (time == null) return "";
    if (time < 1) return `${figures(1000 * time)} ms`;
    if (time < 120) return `${figures(time)} s`;
    if (time < 7200) return `${grouped(time / 60, 1)} min`;
    return `${grouped(time / 3600, 1)} h`;
  }

  function tokens(amount) {
    for (const [unit, size] of [["M", 2 ** 20], ["K", 2 ** 10]]) {
      if (amount && amount % size === 0) return `${grouped(amount / size)}${unit}`;
    }
    return grouped(amount);
  }

  const percent = (share, digits = 0) => (share == null ? "" : `${(100 * share).toFixed(digits)}%`);
  const rate = (amount) => (amount >= 100 ? grouped(amount) : figures(amount));
  const count = (amount) => (amount == null ? "" : figures(amount, 4));

  // -- frame --------------------------------------------------------------------------------------

  // Call once: `build(data)` returns the elements between the page's head and its foot.
  function page(build) {
    const data = JSON.parse(document.getElementById("data").textContent);
    let shown, failed = null;
    try {
      shown = build(data);
    } catch (error) {
      failed = error;
      shown = note("This page cannot be drawn: it cannot read its data " +
        `(${error.message}). A newer farspan may have written them; make the page with that one.`);
    }
    const main = make("main", {}, shown);
    const head = make("header", { class: "top" }, make("h1", {}, document.title), schemeSwitch());
    const by = document.querySelector('meta[name="generator"]').content;
    const foot = make("footer", {}, make("small", {}, data.about ? `${by}. ${data.about}` : by));
    document.body.append(head, main, foot);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
    addEventListener("beforeprint", () => paint("light"));
    addEventListener("afterprint", () => paint(chosenScheme));
    if (failed) throw failed;
  }

  let chosenScheme = "";

  function schemeSwitch() {
    const system = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    const other = () => ((chosenScheme || system()) === "dark" ? "light" : "dark");
    const name = () => `${other()[0].toUpperCase()}${other().slice(1)}`;
    const button = make("button", { type: "button", class: "scheme" }, name());
    button.setAttribute("aria-label", "Switch between light and dark");
    button.addEventListener("click", () => {
      chosenScheme = other();
      paint(chosenScheme);
      button.textContent = name();
    });
    return button;
  }

  function paint(scheme) {
    document.documentElement.style.colorScheme = scheme;
    repaint();
  }

  // Tells canvases when the colour scheme changes.
  const painted = [];
  const repaint = () => painted.forEach((again) => again());
  const onRepaint = (again) => painted.push(again);

  const section = (title, ...children) => {
    const id = fresh("section");
    return make("section", { "aria-labelledby": id }, make("h2", { id }, title), children);
  };
  const columns = (...children) => make("div", { class: "columns" }, children);
  const note = (...children) => make("p", { class: "soft" }, children);
  const words = (lines) => make("ul", { class: "words" }, lines.map((of) => make("li", {}, of)));
  const details = (summary, ...children) =>
    make("details", {}, make("summary", {}, summary), children);

  // [[name, text or element], ...]; pairs without a text are left out.
  function facts(rows) {
    const shown = rows.filter(([, value]) => value != null && value !== "");
    return make("dl", { class: "facts" },
      shown.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  // The main numbers, large: [[name, text], ...].
  function numbers(rows) {
    return make("dl", { class: "numbers" },
      rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  // -- tables -------------------------------------------------------------------------------------

  // columns: [{name, number: right-aligned, spare: left out on narrow screens}]; rows: lists of text
  // or elements; the first element names the row.
  function table({ caption, columns: heads, rows }) {
    const style = (column) => [column.number && "number", column.spare && "spare"]
      .filter(Boolean).join(" ") || null;
    const head = heads.map((of) => make("th", { scope: "col", class: style(of) }, of.name));
    const body = rows.map((row) => make("tr", {}, row.map((cell, place) =>
      make(place ? "td" : "th", { scope: place ? null : "row", class: style(heads[place]) }, cell))));
    const whole = make("table", {}, make("caption", {}, caption),
      make("thead", {}, make("tr", {}, head)), make("tbody", {}, body));
    return make("div", { class: "scroll" }, whole);
  }

  // A table with one chosen row: `onChoose(index)` is called when another is chosen. Tables that
  // share the choice have the same `name`; `first` is the index of a table's first row.
  function choice({ caption, columns: heads, rows, name, chosen, onChoose, first = 0 }) {
    const inputs = rows.map((_, place) => make("input", {
      type: "radio", name, value: first + place, checked: first + place === chosen,
      onchange: () => onChoose(first + place),
    }));
    const found = table({
      caption, columns: heads,
      rows: rows.map(([head, ...rest], place) =>
        [make("label", {}, inputs[place], make("span", {}, head)), ...rest]),
    });
    found.classList.add("choice");
    found.querySelectorAll("tbody tr").forEach((row, place) =>
      row.addEventListener("click", (event) => {
        if (event.target.closest("label")) return;
        inputs[place].click();
        inputs[place].focus();
      }));
    return found;
  }

  // -- bars ---------------------------------------------------------------------------------------

  // Each cause has a hue and a pattern; an unknown cause gets one that is free.
  const LOOKS = {
    weights: ["blue", ""], reference: ["blue", "dotted"], gathered: ["blue", "rising"],
    "streamed weights": ["blue", "level"], optimizer: ["sky", ""], gradients: ["green", ""],
    accumulators: ["green", "rising"], "streamed gradients": ["green", "dotted"],
    x: ["yellow", ""], kv: ["orange", ""], dkv: ["vermilion", ""], attention: ["purple", ""],
    activations: ["purple", "rising"], cells: ["grey", "rising"], slots: ["orange", "dotted"],
    placement: ["grey", "dotted"], exchange: ["sky", "rising"], inputs: ["yellow", "dotted"],
    reserve: ["grey", ""], means: ["yellow", "rising"], choice: ["yellow", "level"],
    slabs: ["orange", "level"], pages: ["grey", "level"],
  };
  const HUES = ["blue", "orange", "green", "vermilion", "sky", "purple", "yellow", "grey"];
  const PATTERNS = ["falling", "level", "dotted", "rising"];
  let unknown = 0;

  function look(key) {
    if (!(key in LOOKS)) {
      LOOKS[key] = [HUES[unknown % HUES.length], PATTERNS[Math.floor(unknown / HUES.length) % 4]];
      unknown += 1;
    }
    return LOOKS[key];
  }

  const swatch = (key) => make("span", { class: `swatch ${look(key).join(" ")}` });

  // Horizontal bars. rows: [{name, value, key: its look, text: the value in words}]; bars are
  // shares of `whole`, the sum by default. `capacity`: first draw all rows as one bar, with an edge
  // at that value; `format` writes values without a text.
  function bars({ title, rows, whole, capacity, format = bytes }) {
    const sum = rows.reduce((total, row) => total + row.value, 0);
    const most = whole || sum || 1;
    const body = rows.map((row) => make("tr", {},
      make("th", { scope: "row" }, row.key ? swatch(row.key) : null, row.name),
      make("td", { class: "number" }, row.text ?? format(row.value)),
      make("td", {}, strip(row, most))));
    const found = make("table", { class: "bars" }, make("caption", {}, title),
      make("tbody", {}, body));
    return make("div", {}, capacity ? full(rows, sum, capacity) : null, found);
  }

  function strip(row, most) {
    const found = make("div", { class: `bar ${row.key ? look(row.key).join(" ") : "blue"}` });
    found.style.width = `${Math.min(100, (100 * row.value) / most)}%`;
    return found;
  }

  function full(rows, sum, capacity) {
    const most = Math.max(sum, capacity);
    const parts = rows.filter((row) => row.value > 0).map((row) => {
      const part = make("div", { class: look(row.key ?? row.name).join(" "), title: row.name });
      part.style.width = `${(100 * row.value) / most}%`;
      return part;
    });
    const edge = make("div", { class: "edge" });
    edge.style.left = `${(100 * capacity) / most}%`;
    const label = `${bytes(sum)} of ${bytes(capacity)}, ${percent(sum / capacity)}`;
    return make("div", { class: "full", role: "img", "aria-label": label }, parts,
      sum > capacity ? edge : null);
  }

  return {
    make, draw, fresh, bytes, seconds, tokens, percent, rate, count, figures, page, section, columns, note, words,
    details, facts, numbers, table, choice, look, swatch, bars, onRepaint,
  };
})();
