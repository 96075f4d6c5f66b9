// The panel at the side: at first the plan at a glance, then whatever was chosen.

class Details {
  constructor(root) { this.root = root; }

  show(selection) {
    const parts = {
      none: () => this.glance(app.model), node: () => this.node(selection), row: () => this.row(selection),
      item: () => this.item(selection), step: () => this.step(selection), device: () => this.device(selection),
    }[selection?.kind ?? "none"]();
    const back = selection ? el("button", { type: "button", class: "close", "aria-label": "back to the overview", title: "Back (Esc)", onclick: () => app.select(null) }, "×") : null;
    this.root.replaceChildren(...[back, ...parts].filter(Boolean));
    this.root.classList.toggle("filled", Boolean(selection));
    this.root.scrollTop = 0;
  }

  nodeLink(model, node) {
    return link(reference(shortened(model.name(node), 44)), () => app.reveal(model, node));
  }

  // ------------------------------------------------------------------------------------------- glance

  glance(model) {
    const inputs = [...Array(model.count).keys()].filter((n) => model.op(n).name === "input");
    const io = facts([
      ["inputs", ...inputs.slice(0, 12).map((n) => el("div", {}, this.nodeLink(model, n), ` ${model.specs(n)[0]}`))],
      ["outputs", ...model.graph.outputs.slice(0, 12).map(([name, v]) => el("div", {}, link(shortened(name, 40), () => app.reveal(model, Math.floor(v / RESULTS))), ` ${model.specs(Math.floor(v / RESULTS))[0]}`))],
    ]);
    if (!model.plan) return [el("h2", {}, "At a glance"), el("p", {}, `${plural(model.count, "node")}, ${plural(model.blocks.length, "block")}.`), io, this.ops(model)];
    const { cost, measured } = model.plan;
    const crossing = model.crossing();
    const peaks = model.plan.programs.map((_, p) => p).map((p) => el("div", {},
      deviceText(model.running(p).map((d) => d.name)), ": ",
      link(`${bytesText(model.plan.programs[p].live[model.peak(p)] ?? 0)} at step ${model.peak(p)}`, () => app.select({ kind: "step", model, program: p, step: model.peak(p) })),
      ` of working memory, ${model.stepOp(p, model.peak(p))} ${reference(shortened(model.stepName(p, model.peak(p)), 30))}`));
    const total = cost.total || 1e-12;
    return [
      el("h2", {}, "At a glance"),
      facts([
        ["one run", el("b", {}, secondsText(cost.total)), ` estimated${page.tokens ? `, of ${plural(page.tokens, "token")}` : ""}`],
        measured && ["measured", el("b", {}, secondsText(measured.seconds)), ` the median of ${plural(measured.runs, "run")} of ${measured.label}${measured.exact ? "" : ", the same steps on other shapes than here"}`],
        crossing.collectives && ["of that", `${secondsText(cost.collectives)} (${percent(cost.collectives / total)}) in ${plural(crossing.collectives, "collective")}`],
        ["transferred", crossing.all ? el("span", {}, el("b", {}, bytesText(crossing.all / (page.tokens ?? 1))), ` ${page.tokens ? "a token" : "a run"} over all links; the busiest device sends ${bytesText(crossing.maxSent / (page.tokens ?? 1))}`) : "nothing: no device needs data of another"],
        ["memory peak", ...peaks],
      ]),
      el("h3", {}, "Inputs and outputs"), io,
      el("h3", {}, "Weights and states by layout"), this.homes(model), this.weights(model),
      ...this.couldLie(model),
      el("h3", {}, "Reasons"), el("ul", { class: "decisions" }, model.plan.decisions.map((d) => el("li", {}, withMicroseconds(d))), model.plan.decisions.length ? "" : el("li", {}, "one device computes everything: there was no choice")),
      el("h3", {}, "Layouts"), this.legend(),
      el("h3", {}, "The graph"), this.ops(model),
    ];
  }

  /** What each device has to itself, by blocks; nothing where all do everything together. */
  homes(model) {
    const blocks = model.devices.map(() => new Set());
    for (const row of model.rows) if (row.op === "work") for (const d of row.devices) blocks[d].add(row.block);
    if (blocks.every((own) => own.size === model.blocks.length)) return null;
    const label = (b) => model.graph.labels[b];
    const text = (own) => {
      const sorted = [...own].sort((a, b) => a - b);
      const runs = [];
      for (const b of sorted) {
        if (runs.at(-1)?.[1] === b - 1) runs.at(-1)[1] = b;
        else runs.push([b, b]);
      }
      return runs.map(([a, b]) => (a === b ? label(a) : `${label(a)} to ${label(b)}`)).join(", ");
    };
    return facts(blocks.map((own, d) => [model.devices[d].name, shortened(text(own), 160)]));
  }

  /** Weights and states by how they lie, with their bytes; those that differ at most in numbers in their names, and are
   * read by the same op, are drawn together. */
  weights(model) {
    const groups = new Map();
    for (let n = 0; n < model.count; n++) {
      const kind = model.op(n).name;
      if (kind !== "weight" && kind !== "state") continue;
      const how = layoutWords(model.layout(n), model.devices);
      const name = model.name(n).replace(/\d+/g, "*");
      const [reader] = model.users[n];
      const use = reader === undefined ? "nobody" : `${model.op(reader).name}${model.op(reader).operands ? ` as ${model.op(reader).operands[model.sources(reader).indexOf(n)]}` : ""}`;
      const about = `${kind} ${model.specs(n)[0]}, read by ${use}`;
      const key = `${about} ${how.kind === "shard" ? how.mark : how.kind} ${name}`;
      if (!groups.has(key)) groups.set(key, { name, about, how, count: 0, nbytes: 0, first: n, sizes: new Set() });
      const group = groups.get(key);
      group.count += 1;
      group.nbytes += model.nbytes(n);
      group.sizes.add(how.words);
    }
    const all = [...groups.values()].sort((a, b) => b.nbytes - a.nbytes);
    const row = (g) => el("li", {}, swatch(g.how.kind), el("span", { class: "mark" }, g.how.kind === "local" ? "one" : g.how.mark),
      link(clipped(g.count > 1 ? g.name : model.name(g.first), g.count > 1 ? 25 : 29), () => app.reveal(model, g.first)), el("span", { class: "times" }, g.count > 1 ? `× ${g.count}` : ""), el("span", { class: "n" }, bytesText(g.nbytes)),
      el("span", { class: "dim" }, `${g.about}; ${eitherWords([...g.sizes])}`));
    const listed = all.slice(0, 14);
    const rest = all.slice(14);
    return el("div", {}, el("ul", { class: "weights" }, listed.map(row)),
      rest.length ? el("details", {}, el("summary", {}, `${rest.length} more, ${bytesText(rest.reduce((n, g) => n + g.nbytes, 0))}`), el("ul", { class: "weights" }, rest.slice(0, 400).map(row))) : "");
  }

  /** Placements that would save memory, with what they cost. */
  couldLie(model) {
    const hints = [...new Set(Object.values(model.plan.hinted))];
    return hints.length ? [el("h3", {}, "Weights that could be elsewhere"), el("ul", { class: "decisions" }, hints.map((h) => el("li", {}, withMicroseconds(h))))] : [];
  }

  legend() {
    return el("ul", { class: "legend" }, [
      ["replicate", "R: whole on each device"], ["shard", "S: sharded along an axis, a shard on each device"],
      ["partial", "P: partial sum, a summand on each device"], ["local", "named device: whole there, nothing elsewhere"],
    ].map(([kind, words]) => el("li", {}, swatch(kind), words)));
  }

  ops(model) {
    const counts = new Map();
    for (let n = 0; n < model.count; n++) if (!model.isLeaf(n)) counts.set(model.op(n).name, (counts.get(model.op(n).name) ?? 0) + 1);
    return el("p", { class: "ops" }, [...counts].sort((a, b) => b[1] - a[1]).map(([op, n]) => el("span", {}, `${op} `, el("b", {}, String(n)))));
  }

  // --------------------------------------------------------------------------------------------- node

  node({ model, node }) {
    const op = model.op(node);
    const how = layoutWords(model.layout(node), model.devices);
    const sources = model.sources(node).map((s, i) => el("div", {}, el("span", { class: "dim" }, `${op.operands?.[i] ?? i} = `), s < 0 ? "left out" : this.nodeLink(model, s), s < 0 ? "" : ` ${model.specs(s)[0]}`, s < 0 || !model.plan ? "" : el("span", { class: "tail" }, swatch(layoutWords(model.layout(s), model.devices).kind), layoutWords(model.layout(s), model.devices).mark)));
    const users = model.users[node].slice(0, 12).map((u) => el("div", {}, this.nodeLink(model, u), ` ${model.op(u).name}`));
    const block = model.block(node);
    return [
      el("h2", {}, op.name), el("p", { class: "name" }, reference(model.name(node))),
      facts([
        ["result", ...model.specs(node).map((s) => el("div", {}, s)), el("div", { class: "dim" }, bytesText(model.nbytes(node)))],
        model.plan && !op.view && ["lies", el("span", {}, swatch(how.kind), ` ${how.words}`)],
        ...(model.plan && model.isLeaf(node) ? [this.decided(model, [node]), this.hinted(model, [node])] : []),
        model.attrs(node) && ["attributes", el("code", {}, model.attrs(node))],
        sources.length && ["reads", ...sources],
        ["read by", ...(users.length ? users : ["no node: an output or a new state"]), model.users[node].length > 12 ? `and ${model.users[node].length - 12} more` : ""],
        block >= 0 && ["part of", link(shortened(model.graph.labels[block], 40), () => app.openGraph(model, model.paths.get(block)))],
      ]),
      ...(model.plan ? this.runs(model, node) : []),
      op.about ? el("details", { open: !model.plan }, el("summary", {}, `What ${op.name} means`), el("p", { class: "about" }, op.about), el("pre", {}, op.meaning)) : null,
      op.view ? el("p", { class: "dim" }, "A view: the same memory under another shape, so nothing runs.") : null,
    ];
  }

  /** Where and when a node runs, what that costs, and why it is there. */
  runs(model, node) {
    const steps = model.steps.get(node) ?? [];
    if (!steps.length) return [];
    const rows = [...new Set(steps.map(({ program, step }) => model.rowAt[program][step]))].filter((r) => r >= 0).map((r) => model.rows[r]);
    const { program, step } = steps[0];
    const cost = model.costs[model.plan.programs[program].cost[step]];
    return [
      el("h3", {}, "Runs"),
      facts([
        ["on", ...steps.map((s) => el("div", {}, deviceText(model.running(s.program).map((d) => d.name)), ", ", link(`step ${s.step}`, () => app.select({ kind: "step", model, program: s.program, step: s.step }))))],
        ...this.costFacts(model, program, cost),
        ...steps.flatMap((s) => this.timeFacts(model, s.program, [s.step])),
        ["backend", [...new Set(steps.flatMap((s) => model.running(s.program).map((d) => d.backend)))].join(", ")],
        ...this.kernelFacts(model, steps),
        rows.length && ["because", ...[...new Set(rows.flatMap((r) => r.because))].map((b) => el("div", {}, b)), link("show in the plan", () => app.showRow(model, rows[0].number))],
        this.decided(model, [node]), this.hinted(model, [node]),
      ]),
    ];
  }

  /** What the search decided about the weights and states that nodes read or are, and what was next best. */
  decided(model, nodes) {
    const reasons = nodes.flatMap((n) => [n, ...model.sources(n)]).flatMap((n) => model.plan.decided[n] ?? []);
    return reasons.length > 0 && ["decided", ...[...new Set(reasons)].map((r) => el("div", {}, withMicroseconds(model.plan.decisions[r])))];
  }

  /** What would pay if the weights that nodes read or are lay elsewhere. */
  hinted(model, nodes) {
    const hints = nodes.flatMap((n) => [n, ...model.sources(n)]).map((n) => model.plan.hinted[n]).filter(Boolean);
    return hints.length > 0 && ["hint", ...[...new Set(hints)].map((h) => el("div", {}, withMicroseconds(h)))];
  }

  /** The kernels that compute steps, where they are written, and their source where it is short. */
  kernelFacts(model, steps) {
    const calls = steps.map((s) => model.plan.calls[model.plan.programs[s.program].calls[s.step]]);
    const kernels = [...new Set(calls.flatMap(([own]) => own))].map((k) => model.plan.kernels[k]);
    const together = Math.max(0, ...calls.map(([, count]) => count));
    const kernelItem = ([name, place, text]) => el("div", {}, el("code", {}, name), el("div", { class: "dim" }, place),
      text ? el("details", {}, el("summary", {}, "its source"), el("pre", {}, text)) : "");
    return kernels.length ? [["kernel", ...kernels.map(kernelItem), together > 1 ? el("div", { class: "dim" }, `${together} steps in one`) : ""]] : [];
  }

  /** What steps took on each device by a trace, and in which kernels if the plan does not say. */
  timeFacts(model, program, steps) {
    if (!model.plan.measured) return [];
    const columns = (d) => model.plan.measured.devices[d.number];
    const sum = (d) => steps.reduce((n, s) => n + (columns(d).seconds[s] ?? 0), 0);
    const devices = model.running(program);
    const [first] = devices;
    const kernels = [...new Set(steps.map((s) => columns(first).kernel[s]).filter((k) => k >= 0))].map((k) => model.plan.texts[k]);
    const together = steps.length === 1 ? columns(first).together[steps[0]] : 0;
    const nothing = el("span", { class: "dim" }, "no kernel ran for it");
    return [
      ["measured", ...(kernels.length ? devices.map((d) => el("div", {}, el("b", {}, secondsText(sum(d))), devices.length > 1 ? ` on ${d.name}` : "")) : [nothing]),
        together > 1 ? el("div", { class: "dim" }, `its share: ${together} steps are one kernel`) : ""],
      !steps.some((s) => model.plan.programs[program].calls[s]) && kernels.length > 0 && kernels.length < 4 && ["kernel", ...kernels.map((k) => el("div", {}, el("code", {}, k)))],
    ].filter(Boolean);
  }

  costFacts(model, program, cost) {
    const { speeds } = model.running(program)[0];
    const busy = Math.max(cost.flops / speeds.flops, cost.nbytes / speeds.bandwidth);
    return [
      ["estimate", el("b", {}, secondsText(cost.seconds)), cost.uncut && cost.uncut > cost.seconds ? `; uncut ${secondsText(cost.uncut)}` : ""],
      cost.nbytes && ["reads, writes", bytesText(cost.nbytes)],
      cost.moved && ["sends", `${bytesText(cost.moved)} on each device`],
      cost.flops && ["arithmetic", `${countText(cost.flops, "FLOP")}`],
      cost.seconds && !cost.moved && ["roofline", `${percent(busy / cost.seconds)} of the time is ${cost.flops / speeds.flops > cost.nbytes / speeds.bandwidth ? "arithmetic" : "memory"}, the rest is launching`],
    ].filter(Boolean);
  }

  // ---------------------------------------------------------------------------------------------- row

  row({ model, row, device }) {
    const cell = row.cells.get(model.devices[device].program);
    const devices = row.devices.filter((d) => model.devices[d].program === cell.program);
    if (row.op !== "work") return this.collective(model, row, cell);
    const p = model.plan.programs[cell.program];
    const steps = Array.from({ length: cell.count }, (_, i) => cell.first + i);
    const nodes = steps.map((s) => p.node[s]).filter((n) => n >= 0);
    const maxSeconds = Math.max(...steps.map((s) => model.costs[p.cost[s]].seconds));
    return [
      el("h2", {}, `${plural(cell.count, "node")} on ${deviceText(devices.map((d) => model.devices[d].name))}`),
      el("p", { class: "name" }, `${model.graph.labels[row.block]}, steps ${cell.first} to ${cell.first + cell.count - 1}`),
      facts([...this.costFacts(model, cell.program, cell), ...this.timeFacts(model, cell.program, steps), ["because", ...row.because.map((b) => el("div", {}, b))], this.decided(model, nodes), this.hinted(model, nodes)]),
      el("p", {}, link("draw as a graph", () => app.openGraph(model, model.paths.get(row.block)))),
      el("ol", { class: "steps", start: cell.first }, steps.map((s) => {
        const cost = model.costs[p.cost[s]];
        const node = p.node[s];
        const text = `${p.ops[p.op[s]]} ${reference(shortened(model.stepName(cell.program, s), 40))}`;
        return el("li", { value: s, class: String(s) in p.own ? "own" : "" }, el("i", { class: "bar", style: { width: `${(100 * cost.seconds) / maxSeconds}%` } }),
          node < 0 ? text : link(text, () => app.reveal(model, node)), el("span", { class: "n" }, secondsText(cost.seconds)));
      })),
    ];
  }

  collective(model, row, cell) {
    const p = model.plan.programs[cell.program];
    const node = p.node[cell.first];
    const names = row.devices.map((d) => model.devices[d].name);
    const { speeds } = model.devices[row.devices[0]];
    return [
      el("h2", {}, row.op === "send" ? `copy ${names[0]} → ${names[1]}` : row.op),
      el("p", { class: "name" }, reference(model.stepName(cell.program, cell.first))),
      facts([
        row.op !== "send" && ["devices", deviceText(names)],
        ["value", node < 0 ? "" : this.nodeLink(model, node), ` ${model.plan.specs[p.spec[cell.first]][0]}`],
        ["each sends", bytesText(cell.moved)],
        ["estimate", el("b", {}, secondsText(cell.seconds)), ` over links of ${countText(speeds.link_bandwidth, "B/s")} that answer in ${secondsText(speeds.link_latency)}`],
        ...row.devices.filter((d, n) => row.devices.findIndex((o) => model.devices[o].program === model.devices[d].program) === n)
          .flatMap((d) => this.timeFacts(model, model.devices[d].program, [row.cells.get(model.devices[d].program).first])),
        ["because", ...row.because.map((b) => el("div", {}, b))],
      ]),
    ];
  }

  // --------------------------------------------------------------------------------------- step, others

  step({ model, program, step }) {
    const p = model.plan.programs[program];
    const living = p.last.map((last, s) => ({ s, last })).filter(({ s, last }) => s <= step && last >= step)
      .map(({ s }) => ({ s, nbytes: model.plan.specs[p.spec[s]][1] })).sort((a, b) => b.nbytes - a.nbytes);
    const node = p.node[step];
    const row = model.rowAt[program][step];
    return [
      el("h2", {}, `step ${step}`), el("p", { class: "name" }, `${p.ops[p.op[step]]} ${reference(model.stepName(program, step))} on ${deviceText(model.running(program).map((d) => d.name))}`),
      facts([
        ["in use", el("b", {}, bytesText(p.live[step])), ` of working memory${step === model.peak(program) ? ", the peak" : ""}`],
        ...this.costFacts(model, program, model.costs[p.cost[step]]),
        ...this.timeFacts(model, program, [step]),
        node >= 0 && ["node", this.nodeLink(model, node)],
        row >= 0 && ["because", ...model.rows[row].because.map((b) => el("div", {}, b))],
      ]),
      el("h3", {}, `What fills it: ${plural(living.length, "value")}`),
      el("ul", { class: "weights" }, living.slice(0, 40).map(({ s, nbytes }) => el("li", {},
        p.node[s] < 0 ? reference(model.stepName(program, s)) : link(reference(shortened(model.stepName(program, s), 34)), () => app.reveal(model, p.node[s])),
        el("span", { class: "n" }, bytesText(nbytes)), el("span", { class: "dim" }, ` ${s} to ${p.last[s]}`)))),
      living.length > 40 ? el("p", { class: "dim" }, `and ${living.length - 40} smaller ones`) : null,
    ];
  }

  item({ model, item, open }) {
    const blocks = model.blocksOf(item);
    const nodes = blocks.reduce((n, b) => n + model.blocks[b].length, 0);
    return [
      el("h2", {}, model.labelOf(item)),
      facts([["nodes", String(nodes)], typeof item !== "number" && ["repeats", `${item.each.length} times the same`]]),
      el("p", {}, link("open", open)),
    ];
  }

  device({ model, device }) {
    const d = model.devices[device];
    const sum = KINDS.reduce((n, [kind]) => n + d.held[kind], 0);
    return [
      el("h2", {}, d.name), el("p", { class: "name" }, `${d.backend}${d.about ? `, ${d.about}` : ""}`),
      facts([
        ...KINDS.map(([kind, words]) => [words, bytesText(d.held[kind])]),
        d.held.undo && ["of that", `${bytesText(d.held.undo)} kept for the rollback of a failed run`],
        d.memory && ["free after", d.memory >= sum ? bytesText(d.memory - sum) : `${bytesText(sum - d.memory)} short`],
        ["assumed speeds", `${countText(d.speeds.flops, "FLOP/s")}, ${countText(d.speeds.bandwidth, "B/s")} of memory, ${countText(d.speeds.link_bandwidth, "B/s")} to others`],
        ["steps", String(model.plan.programs[d.program].op.length)],
      ]),
    ];
  }
}
