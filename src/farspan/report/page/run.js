"use strict";
// The page of one run, or of several side by side; farspan.report.run.runs_json makes its data.
farspan.page((data) => {
  const { make, section, columns, note, words, facts, numbers, table, bars, bytes, seconds, percent,
    count, tokens, details, memory, lines, walk } = farspan;
  const { runs } = data;
  const single = runs.length === 1;

  // Elements that `show` makes for each run, under the run's name if there are several.
  const each = (show) => {
    const shown = runs.map((run) => [run, [show(run)].flat().filter(Boolean)]);
    if (single) return shown[0][1];
    return columns(shown.map(([run, parts]) =>
      make("div", {}, make("h3", {}, run.name), parts.length ? parts : note("Not recorded."))));
  };

  // -- in short -----------------------------------------------------------------------------------

  const whole = (amount) => (amount == null ? "" : amount.toLocaleString("en-US"));
  const trained = ({ parameters, trainable }) => (parameters == null ? ""
    : trainable === parameters ? `${whole(parameters)}, all trained`
      : `${whole(parameters)}, ${percent(trainable / parameters, 2)} trained`);
  const took = ({ commands }) => {
    const known = commands.map((part) => part.took).filter((time) => time != null);
    return known.length ? seconds(known.reduce((sum, time) => sum + time, 0)) : "";
  };
  const loss = (value) => (value == null ? "" : value.toFixed(4));
  const ROWS = [
    ["status", (run) => run.status],
    ["model", (run) => run.summary.model],
    ["parameters", (run) => trained(run.summary)],
    ["context", (run) => run.summary.context && `${tokens(run.summary.context)} tokens`],
    ["sequences a step", (run) => run.summary.sequences],
    ["strategy", (run) => run.summary.strategy],
    ["loss, the latest", (run) => loss(run.summary.loss)],
    ["held-out loss, the latest", (run) => loss(run.summary.heldout_loss)],
    ["tokens a second, the median", (run) => count(run.summary.tokens_per_second)],
    ["a step, the median", (run) => seconds(run.summary.seconds)],
    ["a step, planned", (run) => seconds(run.summary.planned_seconds)],
    ["tokens read", (run) => whole(run.summary.tokens)],
    ["memory at most, measured", (run) => bytes(run.summary.measured_bytes)],
    ["memory at most, planned", (run) => bytes(run.summary.planned_bytes)],
    ["main memory of the process at most", (run) => bytes(run.summary.process_bytes)],
    ["ran for", (run) => took(run)],
  ];

  // Shown larger, above the others, on the page of one run.
  const LARGE = new Set(["status", "loss, the latest", "held-out loss, the latest",
    "tokens a second, the median", "a step, the median", "memory at most, measured"]);

  function inShort() {
    const rows = ROWS.map(([name, of]) => [name, ...runs.map((run) => of(run) || "")]);
    const known = rows.filter(([, ...values]) => values.some(Boolean));
    const heads = (what) => [what, ...runs.map((run) => run.name)].map((name) => ({ name }));
    return [section("Side by side",
      table({ caption: "Runs in short", columns: heads("what"), rows: known })),
    section("What differs", data.settings.length ? table({ caption: "Keys of their run files",
      columns: heads("key"), rows: data.settings }) : note("Their run files say the same."))];
  }

  function alone(run) {
    const of = run.summary;
    const large = [["loss", loss(of.loss)], ["held-out loss", loss(of.heldout_loss)],
      ["tokens a second", count(of.tokens_per_second)], ["a step", seconds(of.seconds)],
      [`${of.tier ?? "memory"} at most`, bytes(of.measured_bytes)]];
    return section("The run", make("p", { class: "verdict" }, run.status),
      numbers(large.filter(([, text]) => text)),
      facts(ROWS.filter(([name]) => !LARGE.has(name)).map(([name, value]) => [name, value(run)])));
  }

  // -- curves -------------------------------------------------------------------------------------

  const TITLES = {
    loss: "Loss of each step", heldout_loss: "Held-out loss", tokens_per_second: "Tokens a second",
    lr: "Learning rate", grad_norm: "Norm of the gradient",
  };
  const FIRST = ["loss", "heldout_loss", "tokens_per_second"];

  function curve(name) {
    const own = runs.filter((run) => run.curves[name]);
    const x = [...new Set(own.flatMap((run) => run.curves[name].x))].sort((a, b) => a - b);
    if (!x.length) return null;
    const place = new Map(x.map((step, index) => [step, index]));
    const series = own.map((run) => {
      const values = new Array(x.length).fill(null);
      run.curves[name].x.forEach((step, at) => { values[place.get(step)] = run.curves[name].y[at]; });
      return { name: single ? "measured" : run.name, values };
    });
    const from = name === "tokens_per_second" ? 0 : null;
    const format = name.endsWith("loss") ? loss : count;
    const title = TITLES[name] ?? name.replaceAll("_", " ");
    if (x.length < 3) { // two points would draw a trend that is not there yet
      const cells = series.map(({ name: of, values }) => [of, ...values.map((v) => format(v))]);
      const columns = ["", ...x.map((step) => `step ${whole(step)}`)].map((of) => ({ name: of }));
      return table({ caption: title, columns, rows: cells });
    }
    return lines({ title, x, xName: "step", series, from, format, formatX: whole, bridge: true });
  }

  function curves() {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
    const more = names.filter((name) => !FIRST.includes(name));
    const thinned = runs.flatMap((run) => Object.values(run.curves))
      .filter(({ x, of }) => x.length < of);
    return section("Loss and speed, measured", columns(FIRST.map(curve)),
      thinned.length ? note("Long curves are drawn at some of their steps, evenly.") : null,
      more.length ? details("More that was measured", columns(more.map(curve))) : null);
  }

  // -- one step -----------------------------------------------------------------------------------

  const wide = (values, length) =>
    (Array.isArray(values) ? values : new Array(length).fill(values));
  const ORDER = ["weights", "reference", "optimizer", "gradients", "accumulators", "inputs"];
  const LAST = ["placement", "cells"];
  const rank = (part) => (LAST.includes(part) ? 100 + LAST.indexOf(part)
    : ORDER.includes(part) ? ORDER.indexOf(part) : 50);

  function causes(run, parts, length) {
    return Object.keys(parts).sort((a, b) => rank(a) - rank(b)).map((key) =>
      ({ key, name: run.parts[key] ?? key, values: wide(parts[key], length) }));
  }

  const totals = (of, length) => Array.from({ length }, (_, place) =>
    of.reduce((sum, { values }) => sum + values[place], 0));

  function stepOf(run) {
    const { memory: held, drawn } = run.step;
    if (!held || !drawn) return { memory: null, walk: null };
    const length = drawn.time.length, parts = [];
    const go = (index) => parts.forEach((part) => part.seek(index));
    const planned = causes(run, held.planned.parts, length);
    const measured = causes(run, held.measured.parts, length);
    const sums = { planned: totals(planned, length), measured: totals(measured, length) };
    const capital = `${held.tier[0].toUpperCase()}${held.tier.slice(1)}`;
    parts.push(memory({ title: `${capital}, as measured, by cause`, x: drawn.time, onSeek: go,
      causes: measured, lines: [{ name: "planned, in all", values: sums.planned }], height: 240 }));
    parts.push(memory({ title: `${capital}, as planned, by cause`, x: drawn.time, onSeek: go,
      causes: planned, lines: [{ name: "measured, in all", values: sums.measured }], height: 240 }));
    if (held.host) {
      parts.push(memory({ title: "Main memory, as planned, by cause", x: drawn.time, onSeek: go,
        causes: causes(run, held.host, length), height: 180 }));
    }
    const start = sums.measured.indexOf(Math.max(...sums.measured));
    const walked = walk({ ...drawn.walk, phases: drawn.phases, thinned: drawn.thinned,
      seconds: drawn.seconds, start, frames: { time: drawn.time, op: drawn.walk.op,
        layer: drawn.walk.layer, chunk: drawn.walk.chunk },
      memory: { title: `${capital} at this moment`, whole: Math.max(held.planned.peak,
        held.measured.peak), rows: [{ name: "measured", values: sums.measured },
        { name: "planned", values: sums.planned }] },
    }, { onSeek: go });
    const charts = parts.slice();
    parts.push(walked);
    requestAnimationFrame(() => go(start));
    const peak = make("p", {}, `At most ${bytes(held.measured.peak)} measured in step ` +
      `${whole(held.step)}, ${bytes(held.planned.peak)} planned.`);
    return { memory: [peak, single ? columns(charts.slice(0, 2)) : charts.slice(0, 2),
      charts.slice(2)], walk: walked };
  }

  const MEMORY_NOTE = "Weights, optimizer states and the buffers of the schedule have their exact " +
    "bytes on both sides. Weight gradients are measured as they appear; the rest of the measured " +
    "bytes are transients of cells. The plan counts both, and the memory of its buffers, at their " +
    "maximum throughout.";

  function timeOf(run) {
    const of = run.seconds;
    if (!of.measured.length && !of.planned.length) return null;
    const most = Math.max(of.total ?? 0, of.planned_total ?? 0);
    const rows = (list) => list.map(([name, value]) => ({ name, value }));
    const measured = of.measured.length ? bars({ whole: most, format: seconds,
      title: `Measured in step ${whole(of.step)}: ${seconds(of.total)}`,
      rows: rows(of.measured) }) : null;
    const planned = of.planned.length ? make("div", {}, bars({ whole: most, format: seconds,
      title: `Planned: ${seconds(of.planned_total)}`, rows: rows(of.planned) }),
    note("Each kind alone, though some overlap. Attention takes " +
      `${seconds(of.attention)}, counted within forward and backward.`)) : null;
    const metered = of.metered
      ? note("Memory was measured in the same step, which makes it a little slower.") : null;
    return [single ? columns(measured, planned) : [measured, planned], metered];
  }

  // -- how it was made ----------------------------------------------------------------------------

  const scheduleOf = (run) => [run.summary.strategy ? make("p", {}, make("b", {},
    run.summary.strategy)) : null, words(run.schedule), run.reason ? note(run.reason) : null];

  const commandsOf = (run) => run.commands.map((part) => facts([
    ["command", part.command && make("code", {}, part.command)],
    ["from", part.started], ["to", part.ended]]));

  const fromOf = (run) => [commandsOf(run), facts([...run.machine, ["versions", run.versions
    .map(([name, text]) => `${name} ${text}`).join(", ")]]),
  details("The run file, with every default", make("pre", {}, run.config))];

  const notes = runs.filter((run) => run.notes.length);
  const steps = runs.map(stepOf);
  const stepFor = new Map(runs.map((run, place) => [run, steps[place]]));
  return [
    single ? alone(runs[0]) : inShort(),
    notes.length ? section("Worth knowing", single ? words(notes[0].notes)
      : each((run) => (run.notes.length ? words(run.notes) : note("Nothing.")))) : null,
    curves(),
    steps.some((step) => step.memory) ? section("Memory over a step",
      each((run) => stepFor.get(run).memory), note(MEMORY_NOTE)) : null,
    runs.some((run) => timeOf(run)) ? section("Seconds by kind of work", each(timeOf)) : null,
    steps.some((step) => step.walk) ? section("The step over the grid of cells",
      note("Each box is a layer's work on a chunk; the thin lines are the inputs of groups. Move " +
        "through the step: with the slider, with arrow keys, or in the charts of its memory."),
      each((run) => stepFor.get(run).walk)) : null,
    section("The schedule, in words", each(scheduleOf)),
    section("Where this comes from", each(fromOf)),
  ];
});
