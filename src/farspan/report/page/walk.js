"use strict";
// The grid of cells, layers upwards and chunks to the right, and a program's walk over it.
Object.assign(farspan, (() => {
  const { make, draw, fresh, bytes, seconds, details, table, note, bars } = farspan;
  const EDGE = 3; // pixels of the height of a group's input
  const WIDEST = 72; // pixels of a cell
  const PLACES = ["nowhere", "host", "device"];
  const [NOT_YET, FORWARD, AGAIN, DONE] = [0, 1, 2, 3]; // phases of a cell
  const PHASE_SHIFT = 8;
  const ANY = "anything that is kept";
  const STATES = {
    "": "not yet computed", nowhere: "computed, nothing kept", host: "kept on the host",
    device: "kept on the device", done: "backward done",
  };

  // Draws the result of farspan.report.plan_page.walk_json. `layers` and `chunks` are the numbers of
  // the shown layers and chunks; frames are columns of one length (`time` seconds, `op`, `layer`,
  // `chunk`, bytes of `device` and `host`); `cells` has the states of each cell, by layer and chunk,
  // as frame, state, frame, state, ...; the state is "not yet" before the first. `inputs` has the
  // states of the inputs of groups. `onSeek(frame)` is called when a user goes to a frame; the
  // returned object's `seek(frame)` goes there. Instead of the bytes of both tiers, `memory` may
  // have its own bars: {title, whole, rows: [{name, values by frame}]}.
  function walk(of, { onSeek } = {}) {
    const picture = grid(of), last = of.frames.time.length - 1;
    const slider = make("input", { type: "range", min: 0, max: last, value: of.start,
      "aria-label": "Position in the step", oninput: () => go(Number(slider.value)) });
    const play = make("button", { type: "button", onclick: () => player.turn() }, "Play");
    const fullest = make("button", { type: "button", onclick: () => go(of.start) }, "Fullest moment");
    const kind = make("select", { onchange: () => seek(Number(slider.value)) },
      [ANY, ...of.kinds].map((name, value) => make("option", { value }, name)));
    const side = readout(of, picture);
    const player = playing(() => Number(slider.value), last, (frame) => go(frame), play);
    function seek(frame) {
      slider.value = frame;
      slider.setAttribute("aria-valuetext", `${spoken(of, frame)}, ${when(of, frame)}`);
      picture.show(frame, Number(kind.value) - 1);
      side.show(frame);
    }
    function go(frame) {
      seek(frame);
      onSeek?.(frame);
    }
    const left = make("div", {}, picture.element,
      make("div", { class: "scrub" }, play, slider, fullest));
    const right = make("div", {}, side.element,
      make("label", {}, "Show", kind));
    const found = make("div", {}, make("div", { class: "walk" }, left, right),
      of.thinned ? note(of.thinned) : null, details("The walk as a table", phases(of)));
    found.seek = seek;
    seek(of.start);
    return found;
  }

  // -- the picture --------------------------------------------------------------------------------

  function grid(of) {
    const rows = rowsOf(of), svg = draw("svg", { class: "cells", role: "img" });
    const boxes = rows.flatMap((row) => of.chunks.map((_, column) => {
      const states = (row.input ? of.inputs : of.cells)[row.index * of.chunks.length + column];
      return { row, column, states, box: draw("rect"), of: "" };
    }));
    const now = draw("rect", { class: "now" });
    svg.append(...boxes.map(({ box }) => box), now);
    const across = make("div", { class: "axis" }, make("span", {}, `layer ${of.layers[0]}`),
      make("span", {}, of.chunks.length > 1 ? `chunks 0 to ${of.chunks.at(-1)}` : "chunk 0"));
    const element = make("div", {},
      make("div", { class: "axis" }, `layer ${of.layers.at(-1)}`), svg, across);
    const counts = {};
    let width = 0, at = 0;
    function show(frame, kind) {
      at = frame;
      for (const state of Object.keys(STATES)) counts[state] = 0;
      for (const cell of boxes) {
        const state = stateOf(cell, frame, kind);
        if (!cell.row.input) counts[state] += 1;
        if (state !== cell.of) cell.box.setAttribute("class", cell.of = state);
      }
      follow(of, rows, now, frame, width);
      svg.setAttribute("aria-label", `Grid of cells: ${summary(counts)}`);
    }
    new ResizeObserver(() => {
      width = Math.min(WIDEST, element.clientWidth / of.chunks.length);
      const whole = width * of.chunks.length, last = rows.at(-1);
      svg.setAttribute("viewBox", `0 0 ${whole} ${last.y + last.height}`);
      svg.style.width = across.style.width = `${whole}px`;
      across.style.minWidth = "min(100%, 11rem)";
      for (const { row, column, box } of boxes) put(box, column * width, row, width);
      follow(of, rows, now, at, width);
    }).observe(element);
    return { element, show, counts };
  }

  function put(box, x, { y, height }, width) {
    for (const [name, value] of Object.entries({ x, y, width, height })) box.setAttribute(name, value);
  }

  function stateOf({ row, states }, frame, kind) {
    const state = at(states, frame);
    if (!row.input) return named(state, kind);
    return state & 3 ? PLACES[state & 3] : "";
  }

  // Rows from the top: cells of a layer, and below a group's first layer the inputs of the group.
  function rowsOf(of) {
    const tall = Math.max(7, Math.min(20, 380 / of.layers.length)), rows = [];
    let y = 0;
    const add = (row) => {
      rows.push({ ...row, y });
      y += row.height;
    };
    for (let index = of.layers.length - 1; index >= 0; index -= 1) {
      add({ index, height: tall, layer: of.layers[index], input: false });
      const group = of.groups.indexOf(of.layers[index]);
      if (group >= 0) add({ index: group, height: EDGE, layer: of.layers[index], input: true });
    }
    return rows;
  }

  function follow(of, rows, now, frame, width) {
    const row = rows.find(({ layer, input }) => !input && layer === of.frames.layer[frame]);
    const column = of.chunks.indexOf(of.frames.chunk[frame]);
    now.style.display = row && column >= 0 ? "" : "none";
    if (row && column >= 0) put(now, column * width, row, width);
  }

  // The state at a frame, from frame, state, frame, state, ...
  function at(states, frame) {
    let low = 0, high = states.length / 2;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (states[2 * middle] <= frame) low = middle + 1;
      else high = middle;
    }
    return low ? states[2 * low - 1] : 0;
  }

  // The state to draw: a cell whose backward is done is drawn as done, even if it has tensors.
  function named(state, kind) {
    const phase = state >> PHASE_SHIFT;
    if (phase === NOT_YET) return "";
    if (phase === DONE) return "done";
    if (kind >= 0) return PLACES[(state >> (2 * kind)) & 3];
    const places = [0, 2, 4, 6].map((shift) => (state >> shift) & 3);
    return PLACES[Math.max(...places)];
  }

  const summary = (counts) => Object.entries(STATES).filter(([state]) => counts[state])
    .map(([state, words]) => `${counts[state]} ${words}`).join(", ");

  // -- next to it ---------------------------------------------------------------------------------

  function readout(of, picture) {
    const runs = make("p", { class: "runs" }), held = make("div");
    const rows = Object.entries(STATES).map(([state, words]) => {
      const number = make("b");
      return [state, number, make("li", {}, sample(state), `${words} `, number)];
    });
    const key = make("ul", { class: "key" }, rows.map(([, , row]) => row));
    function show(frame) {
      runs.replaceChildren(spoken(of, frame), make("br"), make("small", {}, when(of, frame)));
      held.replaceChildren(bars(of.memory ? {
        ...of.memory,
        rows: of.memory.rows.map(({ name, values }) => ({ name, value: values[frame] })),
      } : ofTiers(of, frame)));
      for (const [state, number] of rows) number.textContent = picture.counts[state];
    }
    return { element: make("div", {}, runs, held, key), show };
  }

  function ofTiers({ frames, limits }, frame) {
    return {
      title: "Planned memory at this moment", whole: Math.max(limits.device, limits.host),
      rows: ["device", "host"].map((tier, place) => ({ name: tier,
        value: frames[tier][frame] * scaleOf({ limits }, place),
        text: share(frames[tier][frame], limits[tier]) })),
    };
  }

  // Each bar is a share of its own tier.
  const scaleOf = ({ limits }, place) =>
    Math.max(limits.device, limits.host) / ([limits.device, limits.host][place] || 1);
  const share = (size, limit) => (limit > 0 ? `${bytes(size)} of ${bytes(limit)}` : bytes(size));

  const sample = (state) => draw("svg", { class: "sample", viewBox: "0 0 12 12",
    "aria-hidden": true }, draw("rect", { class: state, x: 0.5, y: 0.5, width: 11, height: 11 }));

  const when = (of, frame) =>
    `${seconds(of.frames.time[frame])} of ${seconds(of.seconds)}, position ${frame + 1} of ` +
    `${of.frames.time.length}`;

  function spoken(of, frame) {
    const { op, layer, chunk } = of.frames;
    const places = [layer[frame] >= 0 && `layer ${layer[frame]}`,
      chunk[frame] >= 0 && `chunk ${chunk[frame]}`].filter(Boolean);
    return [of.ops[op[frame]], ...places].join(", ");
  }

  function phases(of) {
    return table({
      caption: "What runs, in this order",
      columns: [{ name: "what" }, { name: "layers" }, { name: "chunks" },
        { name: "begins", number: true }, { name: "takes", number: true }],
      rows: of.phases.map(([name, layers, chunks, begins, takes]) =>
        [name, layers, chunks, seconds(begins), seconds(takes)]),
    });
  }

  const PLAY_SECONDS = 20; // for a whole step

  function playing(position, last, go, button) {
    let running = false, begun = 0, from = 0;
    function turn() {
      running = !running;
      button.textContent = running ? "Pause" : "Play";
      if (!running) return;
      from = position() >= last ? 0 : position();
      begun = performance.now();
      requestAnimationFrame(next);
    }
    function next(now) {
      if (!running || !button.isConnected) return;
      const frame = Math.min(last, from + Math.floor(((now - begun) / 1000 / PLAY_SECONDS) * last));
      if (frame !== position()) go(frame);
      if (frame >= last) turn();
      else requestAnimationFrame(next);
    }
    return { turn };
  }

  // Fill patterns that other pictures refer to, made once a page.
  function patterns() {
    const lined = (id, hue, ...lines) => draw("pattern", { id, width: 4, height: 4,
      patternUnits: "userSpaceOnUse" }, tinted("rect", hue, { width: 4, height: 4 }),
      lines.map((d) => tinted("path", "paper", { d, "stroke-width": 1.1, fill: "none" })));
    return draw("svg", { class: "defs", "aria-hidden": true }, draw("defs", {},
      lined("nowhere", "grey", "M-1 1 l2 -2 M0 4 l4 -4 M3 5 l2 -2"),
      lined("host", "orange", "M0 1.5 h4"), dotted()));
  }

  function tinted(tag, hue, attributes) {
    const found = draw(tag, attributes);
    found.style[tag === "path" ? "stroke" : "fill"] = `var(--${hue})`;
    return found;
  }

  const dotted = () => draw("pattern", { id: "done", width: 4, height: 4,
    patternUnits: "userSpaceOnUse" }, tinted("rect", "green", { width: 4, height: 4 }),
    tinted("circle", "paper", { cx: 2, cy: 2, r: 0.9 }));

  document.body.append(patterns());
  return { walk };
})());

// A step from farspan.report.plan_page.step_json: memory of both tiers over time, and the walk,
// both at the same frame. `over`: lines drawn over the memory of a tier, such as
// {device: [{name, values}]}, with a value for each of the step's times.
farspan.step = (step, over = {}) => {
  const { make, memory, walk } = farspan;
  const wide = (values, unit) => (Array.isArray(values) ? values.map((of) => of * unit)
    : step.time.map(() => values));
  const parts = [], tiers = {};
  const go = (index) => parts.forEach((part) => part.seek(index));
  for (const tier of ["device", "host"]) {
    const { causes, limit, unit } = step[tier];
    const scaled = causes.map((cause) => ({ ...cause, values: wide(cause.values, unit) }));
    tiers[tier] = step.time.map((_, place) =>
      scaled.reduce((sum, { values }) => sum + values[place], 0));
    if (!causes.length) continue;
    parts.push(memory({
      title: `Memory of the ${tier} over the step, as planned`, x: step.time, causes: scaled,
      limit: limit > 0 ? { bytes: limit, name: `${farspan.bytes(limit)} are there` } : null,
      lines: over[tier] ?? [], onSeek: go, height: tier === "device" ? 260 : 200,
    }));
  }
  const share = (tier, place) => tiers[tier][place] / Math.max(1, step[tier].limit);
  const shares = step.time.map((_, place) => share("device", place) + share("host", place));
  const start = shares.indexOf(Math.max(...shares));
  const { walk: found, phases, thinned, seconds } = step;
  const walked = walk({
    ...found, phases, thinned, seconds, start,
    limits: { device: step.device.limit, host: step.host.limit },
    frames: { time: step.time, op: found.op, layer: found.layer, chunk: found.chunk, ...tiers },
  }, { onSeek: go });
  parts.push(walked);
  requestAnimationFrame(() => go(start));
  return { memory: make("div", {}, parts.slice(0, -1)), walk: walked };
};
