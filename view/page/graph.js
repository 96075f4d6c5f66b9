// The graph: at first its blocks, one box each; what is opened shows its nodes with values, specs and layouts.

const MAX_NODES = 140; // of a repetition that is drawn at once instead of as its blocks
const LONGEST_NAME = 34;

class GraphView {
  constructor(model) {
    this.model = model;
    this.path = []; // [item, repetition, …, block]: where in the tree; [] is the whole
    this.heat = "none";
    this.drawing = new Drawing((id) => this.chosen(id), (id) => this.enter(id));
    this.crumbs = el("div", { class: "crumbs" });
    this.root = el("div", { class: "graph" }, this.crumbs, this.drawing.frame);
  }

  draw() {
    const items = this.model.items(this.path);
    const blocks = this.path.length % 2 ? [items[this.path.at(-1)]] : items.flatMap((i) => this.model.blocksOf(i));
    const nodes = blocks.flatMap((b) => this.model.blocks[b]);
    this.isNodes = this.path.length % 2 === 1 || nodes.length <= MAX_NODES;
    this.drawCrumbs();
    if (this.isNodes) this.drawNodes(nodes);
    else this.drawItems(items);
    return this.root;
  }

  goto(path) { this.path = path; this.draw(); }

  up() {
    if (!this.path.length) return;
    this.goto(this.path.slice(0, this.path.length % 2 ? -1 : -2));
  }

  // ------------------------------------------------------------------------------------------- crumbs

  drawCrumbs() {
    const crumbs = [link("whole graph", () => this.goto([]))];
    let items = this.model.graph.tree;
    for (let i = 0; i < this.path.length; i += 2) {
      const item = items[this.path[i]];
      crumbs.push(el("span", { "aria-hidden": "true" }, "›"));
      if (typeof item === "number") { crumbs.push(el("b", {}, shortened(this.model.graph.labels[item], 60))); break; }
      const at = this.path[i + 1];
      const prefix = this.path.slice(0, i + 1);
      crumbs.push(el("select", { "aria-label": "which repetition", onchange: (e) => this.goto([...prefix, Number(e.target.value)]) },
        item.each.map((one, n) => el("option", { value: n, selected: n === at }, `${one.label}  (${n + 1} of ${item.each.length})`))));
      items = item.each[at].items;
    }
    const tools = el("span", { class: "zoom" },
      el("button", { type: "button", title: "Larger (+)", onclick: () => this.drawing.scale(this.drawing.zoom * 1.25) }, "+"),
      el("button", { type: "button", title: "Smaller (-)", onclick: () => this.drawing.scale(this.drawing.zoom / 1.25) }, "−"),
      el("button", { type: "button", title: "All (0)", onclick: () => this.drawing.whole() }, "all"));
    this.crumbs.replaceChildren(...crumbs, tools);
  }

  // -------------------------------------------------------------------------------------------- items

  drawItems(items) {
    const { model } = this;
    const holder = new Map();
    items.forEach((item, i) => model.blocksOf(item).forEach((b) => holder.set(b, i)));
    const boxes = items.map((item, i) => {
      const blocks = model.blocksOf(item);
      const nodes = blocks.reduce((n, b) => n + model.blocks[b].length, 0);
      const times = typeof item === "number" ? "" : `× ${item.each.length}`;
      const lines = [
        { text: `${shortened(model.labelOf(item), LONGEST_NAME)} ${times}`, class: "title", wide: 1.15 },
        { text: `${plural(nodes, "node")} · ${this.weightText(blocks)}`, class: "dim" },
      ];
      if (model.plan) lines.push({ text: this.timeText(blocks), class: "dim" });
      return { id: i, lines, kind: typeof item === "number" ? "part" : "group", title: "double-click or Enter opens it" };
    });
    const arrows = new Map();
    const outer = new Map();
    for (const [b, to] of holder) {
      for (const node of model.blocks[b]) {
        for (const s of model.sources(node)) {
          if (s < 0 || model.isLeaf(s)) continue;
          const from = holder.get(model.block(s));
          if (from === to) continue;
          const target = from === undefined ? outer : arrows;
          const key = from === undefined ? `out ${s} ${to}` : `${from} ${to}`;
          if (!target.has(key)) target.set(key, { from: from ?? `source ${s}`, to, values: new Set() });
          target.get(key).values.add(s);
        }
      }
    }
    const outside = new Map([...outer.values()].map((a) => [a.from, this.outside([...a.values][0], a.from)]));
    const all = [...arrows.values(), ...outer.values()].map((a) => ({
      ...a, class: outer.size && typeof a.from === "string" ? "outer" : "",
      title: [...a.values].slice(0, 8).map((v) => `${reference(shortened(model.name(v), 60))}: ${model.specs(v).join(", ")}`).join("\n"),
    }));
    this.drawing.show([...outside.values(), ...boxes], all);
  }

  weightText(blocks) {
    const seen = new Set();
    for (const b of blocks) for (const n of this.model.blocks[b]) for (const s of this.model.sources(n)) if (s >= 0 && this.model.op(s).name === "weight") seen.add(s);
    const sum = [...seen].reduce((all, n) => all + this.model.nbytes(n), 0);
    return seen.size ? `${bytesText(sum)} of weights` : "no weights";
  }

  timeText(blocks) {
    const { each } = totals(this.model, blocks.flatMap((b) => this.model.rowsOf[b]));
    return `${secondsText(Math.max(...each.map((e) => e.seconds)))} · on ${deviceText(this.model.devices.filter((d, n) => each[n].count).map((d) => d.name)) || "no device"}`;
  }

  // -------------------------------------------------------------------------------------------- nodes

  drawNodes(nodes) {
    const inside = new Set(nodes);
    const boxes = nodes.map((n) => this.box(n));
    const arrows = [];
    const outside = new Map();
    for (const node of nodes) {
      for (const s of new Set(this.model.sources(node))) {
        if (s < 0 || (this.model.isLeaf(s) && this.model.op(s).name !== "input")) continue;
        if (inside.has(s)) arrows.push({ from: s, to: node, weight: 2, title: this.valueText(s) });
        else {
          const id = `source ${s}`;
          if (!outside.has(id)) outside.set(id, this.outside(s, id));
          arrows.push({ from: id, to: node, class: "outer", title: this.valueText(s) });
        }
      }
      const readers = this.model.users[node].filter((u) => !inside.has(u));
      const names = this.model.graph.outputs.filter(([, v]) => Math.floor(v / RESULTS) === node).map(([name]) => name);
      const states = this.model.graph.updates.filter(([, v]) => Math.floor(v / RESULTS) === node).map(([old]) => Math.floor(old / RESULTS));
      const ends = [
        readers.length && `→ ${this.placeText(this.model.block(readers[0]))}${readers.length > 1 ? ` and ${readers.length - 1} more` : ""}`,
        ...names.map((n) => `output ${n}`), ...states.map((s) => `new ${this.model.name(s)}`),
      ].filter(Boolean);
      ends.forEach((text, i) => {
        const id = `end ${node} ${i}`;
        outside.set(id, { id, lines: [{ text: shortened(text, LONGEST_NAME), class: "dim" }], kind: "outside", round: 12, title: text });
        arrows.push({ from: node, to: id, class: "outer", title: this.valueText(node) });
      });
    }
    this.drawing.show([...outside.values(), ...boxes], arrows);
  }

  valueText(node) { return `${reference(shortened(this.model.name(node), 200))}: ${this.model.specs(node).join(", ")}`; }
  placeText(block) { return block < 0 ? "" : this.model.graph.labels[block]; }

  outside(node, id) {
    const place = this.placeText(this.model.block(node));
    const lines = [
      { text: shortened(`${reference(this.model.name(node))}${place ? ` of ${place}` : ""}`, LONGEST_NAME + 10), class: "dim" },
      { text: shortened(this.model.specs(node).join(", "), LONGEST_NAME), class: "dim" },
    ];
    return { id, lines, kind: "outside", round: 12, title: this.valueText(node) };
  }

  /** A node with the weights and states it reads, its result and how that lies on the devices. */
  box(node) {
    const { model } = this;
    const layout = model.plan ? layoutWords(model.layout(node), model.devices) : null;
    const prefix = `${model.graph.labels[model.block(node)]}.`;
    const short = (name) => shortened(name.startsWith(prefix) ? name.slice(prefix.length) : name, LONGEST_NAME);
    const isView = model.isView(node);
    const shape = shortened(model.specs(node).join(", "), LONGEST_NAME + 8) + (layout && layout.mark && !isView ? `  ${layout.mark}` : "");
    const lines = isView
      ? [{ text: model.op(node).name, class: "dim" }, { text: shape, class: "dim" }]
      : [{ text: model.op(node).name, class: "title", wide: 1.15 }, { text: reference(short(model.name(node))) }, { text: shape, class: "dim" }];
    for (const s of new Set(model.sources(node))) {
      if (s < 0 || !model.isLeaf(s) || model.op(s).name === "input") continue;
      const sign = { weight: "◆", state: "●", constant: "■" }[model.op(s).name];
      const how = model.plan ? layoutWords(model.layout(s), model.devices).mark : "";
      lines.push({ text: `${sign} ${short(model.name(s))} ${model.specs(s)[0]} ${how}`.trimEnd(), class: "leaf" });
    }
    return { id: node, lines, kind: isView ? "view" : "node", hatch: layout && layout.kind !== "none" ? layout.kind : null, heat: this.heatOf(node), title: `${model.op(node).name}: ${this.valueText(node)}` };
  }

  heatOf(node) {
    if (this.heat === "none" || !this.model.plan) return 0;
    const where = this.model.steps.get(node)?.[0];
    if (!where) return 0;
    const cost = this.model.costs[this.model.plan.programs[where.program].cost[where.step]];
    const took = this.model.took(where.program, where.step);
    const { speeds } = this.model.running(where.program)[0];
    this.maxima ??= { seconds: Math.max(...this.model.costs.map((c) => c.seconds)), nbytes: Math.max(...this.model.costs.map((c) => c.nbytes)), took: this.model.slowest() };
    const busy = Math.max(cost.flops / speeds.flops, cost.nbytes / speeds.bandwidth);
    return Math.min(1, HEATS[this.heat].of({ ...cost, busy, took }, this.maxima));
  }

  // ---------------------------------------------------------------------------------------- selection

  chosen(id) {
    if (this.isNodes && typeof id === "number") app.select({ kind: "node", model: this.model, node: id });
    else if (typeof id === "string" && id.startsWith("source ")) app.select({ kind: "node", model: this.model, node: Number(id.slice(7)) });
    else if (typeof id === "number") app.select({ kind: "item", model: this.model, item: this.model.items(this.path)[id], open: () => this.enter(id) });
  }

  enter(id) {
    if (typeof id === "string") {
      if (id.startsWith("source ")) this.reveal(Number(id.slice(7)));
      else if (id.startsWith("end ")) {
        const away = this.model.users[Number(id.split(" ")[1])].find((u) => this.model.block(u) !== this.model.block(Number(id.split(" ")[1])));
        if (away !== undefined) this.reveal(away);
      }
    } else if (!this.isNodes) {
      const item = this.model.items(this.path)[id];
      this.goto(typeof item === "number" ? [...this.path, id] : [...this.path, id, 0]);
    }
  }

  /** Draw the block of a node and mark it; a leaf is shown where it is first read. */
  reveal(node) {
    const user = this.model.isLeaf(node) ? this.model.users[node][0] ?? node : node;
    const path = this.model.paths.get(this.model.block(user));
    if (path && path.join() !== this.path.join()) this.goto(path);
    this.drawing.select(user, this.model.isLeaf(node));
  }
}
