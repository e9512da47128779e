"use strict";
// The page of a plan: the question, the answer, and all plans to click through.
farspan.page((data) => {
  const { make, section, columns, note, words, facts, numbers, choice, bars, bytes, seconds,
    percent, rate, step } = farspan;
  const { plans } = data;
  const front = make("div", { "aria-live": "polite" }), detail = make("div");

  const verdict = (plan) => (plan.fits ? (plan.tight ? "Fits, tightly" : "Fits") : "Does not fit");
  const feeling = (plan) => (plan.fits ? (plan.tight ? "warn" : "good") : "bad");
  const share = ({ total, limit }) => (limit > 0 ? percent(total / limit) : bytes(total));
  const fits = (plan) => (plan.fits ? (plan.tight ? "tight" : "yes") : "no");

  function show(place) {
    const plan = plans[place], drawn = plan.step && step(plan.step);
    front.replaceChildren(...answer(plan));
    detail.replaceChildren(...[memoryOf(plan, drawn), drawn && walkOf(drawn),
      plan.fits && inWords(plan)].filter(Boolean));
  }

  function answer(plan) {
    const [spare, ...more] = plan.verdict;
    return [
      make("h2", {}, plan === plans[0] ? "The answer" : `Another plan: ${plan.strategy}`),
      make("p", { class: `verdict ${feeling(plan)}` }, `${verdict(plan)}: ${spare}`),
      plan.subject === plans[0].subject ? null : make("p", {}, plan.subject),
      more.length ? words(more) : null,
      plan.changes.length ? make("p", {}, "Cheapest changes that make it fit:") : null,
      plan.changes.length ? words(plan.changes) : null,
      numbers([...(plan.fits ? [[`a step, planned, bound by ${plan.bound}`, seconds(plan.seconds)],
        ["tokens a second", rate(plan.tokens_per_second)], ["MFU", percent(plan.mfu, 1)]] : []),
        ...(plan.unified ? [["of the memory", share(plan.device)]]
          : [["of the device", share(plan.device)], ["of the host", share(plan.host)]])]),
      plan.notes.length ? words(plan.notes.map((of) => `Note: ${of}`)) : null,
    ].filter(Boolean);
  }

  function why(plan) {
    const gap = plan.gap
      ? `At most ${plan.gap} slower than the best of all schedules.` : null;
    return [plan.why ? make("p", {}, make("b", {}, "Why: "), plan.why) : null,
      gap ? note(gap) : null];
  }

  const budget = (name, { total, limit, parts }) => bars({
    title: `${name}: ${bytes(total)} of ${bytes(Math.max(0, limit))}`, capacity: limit > 0 && limit,
    whole: Math.max(total, limit), rows: parts.map(([key, of, value]) => ({ key, name: of, value })),
  });

  function memoryOf(plan, drawn) {
    return section("Memory by cause, planned",
      columns(budget("Device", plan.device),
        plan.host.parts.length || !plan.unified ? budget("Host", plan.host) : null),
      drawn ? [drawn.memory, note(data.drawn)]
        : note(`The step of this plan is not drawn: ${plan.fits ? "the page draws only the first"
          : "it does not fit"}.`));
  }

  const walkOf = (drawn) => section("The step over the grid of cells",
    note("Each box is a layer's work on a chunk of the sequence; the thin lines are inputs of ",
      "groups of layers. Move through the step with the slider, or in the charts above."),
    drawn.walk);

  const inWords = (plan) => section(`The schedule: ${plan.strategy}`, columns(
    make("div", {}, words(plan.schedule), why(plan)),
    make("div", {}, bars({
      title: `Seconds by kind of work, planned: a step takes ${seconds(plan.seconds)}`,
      whole: plan.seconds, format: seconds,
      rows: plan.busy.map(([name, value]) => ({ name, value })),
    }), note(`MFU: ${data.mfu}.`))));

  // -- all plans ----------------------------------------------------------------------------------

  const head = [{ name: "strategy" }, { name: "fits" }, { name: "step", number: true },
    { name: "device", number: true }, { name: "host", number: true }];
  const more = ["chunk", "groups", "O kept", "rest kept"]
    .map((name) => ({ name, number: true, spare: true }));
  const row = (plan) => [plan.strategy, fits(plan), plan.fits ? seconds(plan.seconds) : "",
    share(plan.device), share(plan.host)];
  const tokens = (many) => farspan.tokens(many);

  function runnersUp(list) {
    return choice({
      caption: "The choice and its runners-up", name: "plan", chosen: 0, onChoose: show,
      columns: [...head, ...more],
      rows: list.map((plan) => [...row(plan), tokens(plan.chunk), plan.groups,
        percent(plan.attention), percent(plan.activations)]),
    });
  }

  function longest(list, first) {
    const [name, , ...others] = head;
    return [choice({
      caption: "The longest context of each strategy" + (data.max_step == null ? ""
        : `, steps of at most ${seconds(data.max_step)}`), name: "plan", chosen: 0, onChoose: show, first,
      columns: [name, { name: "tokens", number: true }, ...others,
        { name: "tokens/s", number: true, spare: true }, { name: "MFU", number: true, spare: true },
        { name: "bound by", spare: true }],
      rows: list.map((plan) => [plan.strategy, tokens(plan.tokens), seconds(plan.seconds),
        share(plan.device), share(plan.host), rate(plan.tokens_per_second), percent(plan.mfu, 1),
        plan.bound]),
    }), data.without.length ? note(`At no context fits: ${data.without.join(", ")}.`) : null];
  }

  show(0);
  const best = plans.slice(0, data.longest), long = plans.slice(data.longest);
  const several = plans.length > 1 || plans[0].fits;
  const all = several && make("div", {}, make("h2", {}, "Plans to choose from"),
    best.length ? runnersUp(best) : null, long.length ? longest(long, best.length) : null);
  return [
    make("p", { class: "soft" }, plans[0].subject),
    data.words.length ? words(data.words) : null,
    make("section", { class: "front", "aria-label": "The answer and all plans" }, front, ...(all ? [all] : [])),
    detail,
    section("Where this comes from", facts([["command", data.command && make("code", {}, data.command)],
      ["machine", data.machine.machine], ["its memory", data.machine.memory],
      ["farspan", data.machine.farspan]])),
  ];
});
