"use strict";
// Lines and areas over a step or over steps, drawn by uPlot.
Object.assign(farspan, (() => {
  const { make, draw, bytes, seconds, look, swatch, details, table } = farspan;
  const charts = new Set();

  function redraw() {
    for (const chart of charts) {
      if (chart.root.isConnected) chart.redraw(false);
      else forget(chart);
    }
  }

  function forget(chart) {
    chart.watcher.disconnect();
    chart.destroy();
    charts.delete(chart);
  }

  // The colour of a variable of page.css in the current scheme.
  function ink(name) {
    const probe = document.body.appendChild(make("i"));
    probe.style.color = `var(--${name})`;
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  // A hue with its pattern for a canvas, as in page.css.
  function fill(key) {
    const [hue, pattern] = look(key);
    if (!pattern) return ink(hue);
    const scale = devicePixelRatio || 1, size = Math.round(8 * scale);
    const tile = make("canvas", { width: size, height: size }), pen = tile.getContext("2d");
    pen.fillStyle = ink(hue);
    pen.fillRect(0, 0, size, size);
    pen.strokeStyle = pen.fillStyle = ink("mark");
    pen.lineWidth = 2 * scale;
    pen.beginPath();
    if (pattern === "dotted") pen.arc(size / 2, size / 2, 1.7 * scale, 0, 7);
    else if (pattern === "level") lineOf(pen, 0, size / 2, size, size / 2);
    else for (const shift of [-size, 0, size]) slanted(pen, pattern, shift, size);
    if (pattern === "dotted") pen.fill();
    else pen.stroke();
    return pen.createPattern(tile, "repeat");
  }

  function slanted(pen, pattern, shift, size) {
    if (pattern === "rising") lineOf(pen, shift - 2, size + 2, shift + size + 2, -2);
    else lineOf(pen, shift - 2, -2, shift + size + 2, size + 2);
  }

  function lineOf(pen, x0, y0, x1, y1) {
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
  }

  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';

  function axis(format, size, space = 30) {
    return {
      stroke: () => ink("soft"), font: FONT, size, space, gap: 4,
      grid: { stroke: () => ink("rule"), width: 1 }, ticks: { show: false },
      values: (_, splits) => splits.map((of) => (of == null ? "" : format(of))),
    };
  }

  // Ticks of an axis at whole numbers of a unit, the largest that fits the axis's range.
  function splitsOf(low, high, units, count) {
    const unit = units.findLast((of) => of <= high - low) ?? units[0];
    const step = unit * niceStep((high - low) / unit / count);
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 },
      (_, place) => (first + place) * step);
  }

  const niceStep = (rough) => {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].find((of) => of * power >= 0.75 * rough) * power;
  };

  const BYTES = [1, 2 ** 10, 2 ** 20, 2 ** 30, 2 ** 40];

  // Times of an axis, all in the same unit.
  function timeAxis(end) {
    const [size, unit] = [[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]]
      .find(([of]) => end >= 2 * of || of === 1e-6);
    return {
      ...axis((time) => (time ? `${farspan.figures(time / size)} ${unit}` : "0"), 26, 60),
      splits: (drawn, _, low, high) => splitsOf(low, high, [size], drawn.width / 110),
    };
  }

  const byteAxis = {
    ...axis((size) => (size ? bytes(size).replace(".0 ", " ") : "0"), 66),
    splits: (drawn, _, low, high) => splitsOf(low, high, BYTES, drawn.height / 55),
  };

  // A chart in a figure; the pointer and arrow keys move its cursor. `say(index)` describes a place;
  // `seek(index)` moves the cursor, which begins at `start`; `onSeek(index)` is called when a user
  // moves it.
  function chart({ title, name, options, data, height, key, say, onSeek, onDraw, below,
    start = 0 }) {
    const plot = make("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": name });
    const found = make("figure", {}, make("figcaption", {}, title), plot, key, below);
    const most = data[0].length - 1;
    let at = -1, mine = false;
    plot.setAttribute("aria-valuemin", 0);
    plot.setAttribute("aria-valuemax", most);
    const tell = (index) => {
      at = index;
      plot.setAttribute("aria-valuenow", index);
      plot.setAttribute("aria-valuetext", say(index));
    };
    const drawn = new uPlot({
      width: 300, height, legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      hooks: {
        setCursor: [({ cursor }) => {
          if (cursor.idx == null || mine || cursor.idx === at) return;
          tell(cursor.idx);
          onSeek?.(cursor.idx);
        }],
        draw: onDraw ? [onDraw] : [],
      },
      ...options,
    }, data, plot);
    found.seek = (index) => {
      mine = true;
      drawn.setCursor({ left: drawn.valToPos(data[0][index], "x"), top: 1 }, false);
      mine = false;
      tell(index);
    };
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 20,
        PageDown: -20, Home: -Infinity, End: Infinity }[event.key];
      if (!step) return;
      event.preventDefault();
      found.seek(Math.max(0, Math.min(most, Math.max(0, at) + step)));
      onSeek?.(at);
    });
    drawn.watcher = new ResizeObserver(() => {
      if (plot.clientWidth) drawn.setSize({ width: plot.clientWidth, height });
      // uPlot applies a new size, and with it the cursor, in a later task.
      queueMicrotask(() => found.seek(at));
    });
    drawn.watcher.observe(plot);
    charts.add(drawn);
    tell(start);
    return found;
  }

  // A horizontal line with a label.
  function level(drawn, height, text) {
    const pen = drawn.ctx, scale = devicePixelRatio || 1, box = drawn.bbox;
    const y = drawn.valToPos(height, "y", true);
    pen.save();
    pen.strokeStyle = pen.fillStyle = ink("ink");
    pen.lineWidth = 1.5 * scale;
    pen.setLineDash([5 * scale, 4 * scale]);
    pen.beginPath();
    lineOf(pen, box.left, y, box.left + box.width, y);
    pen.stroke();
    pen.font = FONT.replace("12px", `${12 * scale}px`);
    pen.textAlign = "right";
    pen.textBaseline = "bottom";
    pen.setLineDash([]);
    pen.strokeStyle = ink("paper");
    pen.lineWidth = 4 * scale;
    pen.strokeText(text, box.left + box.width - 4 * scale, y - 3 * scale);
    pen.fillText(text, box.left + box.width - 4 * scale, y - 3 * scale);
    pen.restore();
  }

  // -- memory over a step -------------------------------------------------------------------------

  // Stacked by cause. x: seconds, ascending; causes: [{key: its look, name, values: bytes at each
  // x}], the lowest first; lines: [{name, values}] drawn over them, such as what was measured, null
  // for unknown values; limit: {bytes, name} of the memory; `onSeek(index)` is called when a user
  // goes to a place of x, and the returned object's `seek(index)` goes there.
  function memory({ title, x, causes, lines: over = [], limit, onSeek, height = 250 }) {
    const stack = sums(causes, x.length), total = stack.at(-1) ?? x.map(() => 0);
    const known = over.flatMap((of) => of.values);
    const top = 1.1 * known.reduce((most, of) => Math.max(most, of ?? 0), Math.max(...total)) || 1;
    const shown = limit && limit.bytes < 3 * top ? Math.max(top, 1.1 * limit.bytes) : top;
    const paths = uPlot.paths.stepped({ align: 1 }), points = { show: false };
    const area = (cause) =>
      ({ fill: () => fill(cause.key), stroke: () => ink("paper"), width: 1, paths, points });
    const line = (_, place) =>
      ({ stroke: () => ink("ink"), width: 2, dash: dash(place), paths, points });
    const { key, tell } = legend([...over.map((of, place) => [dashed(place, "ink"), of]),
      ...causes.map((of) => [swatch(of.key), of]).reverse()], bytes);
    return chart({
      title, name: `${title}: time in the step`, height, key, onSeek,
      data: [x, ...stack.toReversed(), ...over.map((of) => of.values)],
      options: {
        padding: [8, 14, 0, 0],
        scales: { x: { time: false, range: [x[0], x.at(-1)] }, y: { range: [0, shown] } },
        axes: [timeAxis(x.at(-1)), byteAxis],
        series: [{}, ...causes.map(area).reverse(), ...over.map(line)],
      },
      onDraw: (drawn) => limit && limit.bytes < shown && level(drawn, limit.bytes, limit.name),
      say: (index) => {
        tell(index);
        return `${seconds(x[index])}: ${bytes(total[index])}`;
      },
      below: details("As a table", memoryTable(title, causes, over, total)),
    });
  }

  function sums(causes, length) {
    const below = new Array(length).fill(0);
    return causes.map(({ values }) => {
      values.forEach((size, place) => { below[place] += size; });
      return [...below];
    });
  }

  // A legend; `tell(index)` writes the values at a place, or the last ones before it.
  function legend(rows, format) {
    const texts = rows.map(() => make("b"));
    const key = make("ul", { class: "key" },
      rows.map(([mark, { name }], place) => make("li", {}, mark, `${name} `, texts[place])));
    const tell = (index) => rows.forEach(([, { values }], place) => {
      const latest = values.slice(0, index + 1).findLast((of) => of != null);
      texts[place].textContent = latest == null ? "" : format(latest);
    });
    return { key, tell };
  }

  function memoryTable(title, causes, over, total) {
    const fullest = total.indexOf(Math.max(...total));
    const row = ({ name, values }) => {
      const there = values.filter((of) => of != null);
      return [name, ...[values[0], values[fullest], values.at(-1), Math.max(...there)].map(bytes)];
    };
    const heads = ["at its begin", "at its fullest moment", "at its end", "at most"];
    return table({
      caption: `${title}, in numbers`,
      columns: [{ name: "cause" }, ...heads.map((name) => ({ name, number: true }))],
      rows: [...[...causes].reverse(), { name: "in all", values: total }, ...over].map(row),
    });
  }

  // -- lines --------------------------------------------------------------------------------------

  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [12, 5]];
  const LINES = ["blue", "vermilion", "green", "purple", "orange"];
  const dash = (place) => DASHES[place % DASHES.length];

  function dashed(place, hue = LINES[place % LINES.length]) {
    const line = draw("line", { x1: 0, y1: 3.5, x2: 30, y2: 3.5, "stroke-width": 2.5,
      "stroke-dasharray": dash(place).join(" ") || null });
    line.style.stroke = `var(--${hue})`;
    return draw("svg", { viewBox: "0 0 30 7", "aria-hidden": true }, line);
  }

  // Lines over one ascending x. series: [{name, values}], null for missing values; `format`
  // and `formatX` write values; `log`: a logarithmic axis; `from`: the axis begins there;
  // `bridge`: draw lines across missing values.
  function lines({ title, x, xName, series, format = farspan.count, formatX = farspan.count,
    log = false, from = null, bridge = false, height = 230, onSeek }) {
    const { key, tell } = legend(series.map((of, place) => [dashed(place), of]), format);
    const line = (_, place) => ({ stroke: () => ink(LINES[place % LINES.length]), width: 2,
      dash: dash(place), spanGaps: bridge, points: { show: x.length < 40, size: 5 } });
    const range = (_, low, high) => ends(low, high, from);
    return chart({
      title, name: `${title}: ${xName}`, height, key, onSeek, start: x.length - 1,
      data: [x, ...series.map((of) => of.values)],
      options: {
        padding: [8, 14, 0, 0],
        scales: { x: { time: false }, y: log ? { distr: 3 } : { range } },
        axes: [axis(formatX, 26, 70), axis(format, 60)],
        series: [{}, ...series.map(line)],
      },
      say: (index) => {
        tell(index);
        const texts = series.map(({ name, values }) =>
          values[index] == null ? null : `${name} ${format(values[index])}`);
        return `${xName} ${formatX(x[index])}: ${texts.filter(Boolean).join(", ")}`;
      },
      below: details("As a table", linesTable({ title, x, xName, series, format, formatX })),
    });
  }

  function ends(low, high, from) {
    if (low == null) return [0, 1];
    const bottom = from ?? low, room = 0.06 * (high - bottom) || 0.05 * Math.abs(high) || 1;
    return [from ?? bottom - room, high + room];
  }

  const TABLE_ROWS = 24; // most rows that a table shows of a long x

  function linesTable({ title, x, xName, series, format, formatX }) {
    const step = Math.max(1, (x.length - 1) / (TABLE_ROWS - 1));
    const places = new Set(Array.from({ length: Math.min(TABLE_ROWS, x.length) },
      (_, place) => Math.round(place * step)));
    return table({
      caption: places.size < x.length ? `${title}, some of ${x.length}` : title,
      columns: [{ name: xName }, ...series.map(({ name }) => ({ name, number: true }))],
      rows: [...places].map((place) => [formatX(x[place]),
        ...series.map(({ values }) => (values[place] == null ? "" : format(values[place])))]),
    });
  }

  farspan.onRepaint(redraw);
  return { memory, lines, ink };
})());
