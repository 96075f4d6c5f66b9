// The passes of planning, for one block: what each of them makes of its nodes, and what it changes.

const PASSES = [
  ["built", "As built", "The nodes as the user's graph has them."],
  ["factors", "Factors", "Every axis as a product of factors; those of one letter are one and the same. Marked: factors that are sharded."],
  ["layouts", "Layouts", "The layout of every value after these factors are sharded."],
  ["shards", "Shards", "The graph of each device: local shapes, and conversions between layouts. Marked: nodes that are new or smaller."],
  ["memory", "Memory", "Bytes of each result on a device, with the first and the last step that needs them."],
  ["program", "Program", "The steps in execution order, with their predicted times."],
];

class PassesView {
  constructor(model) {
    this.model = model;
    this.pass = "built";
    this.block = model.blocks.findIndex((nodes, b) => this.isListed(b) && nodes.length > 5);
    if (this.block < 0) this.block = 0;
    this.program = 0;
    this.root = el("div", { class: "passes" });
  }

  /** Whether a block is of the first repetition of every group around it: the others are the same. */
  isListed(block) {
    return this.model.paths.get(block).every((at, i) => i % 2 === 0 || at === 0);
  }

  draw() {
    const { model } = this;
    const blocks = model.blocks.map((_, b) => b).filter((b) => this.isListed(b));
    const [, , words] = PASSES.find(([id]) => id === this.pass);
    this.root.replaceChildren(
      el("div", { class: "line" },
        el("label", {}, "Part ", el("select", { onchange: (e) => { this.block = Number(e.target.value); this.draw(); } },
          blocks.map((b) => el("option", { value: b, selected: b === this.block }, `${shortened(model.graph.labels[b], 60)}, ${plural(model.blocks[b].length, "node")}`)))),
        model.plan.programs.length > 1 ? el("label", {}, "Device ", el("select", { onchange: (e) => { this.program = Number(e.target.value); this.draw(); } },
          model.plan.programs.map((_, p) => el("option", { value: p, selected: p === this.program }, deviceText(model.running(p).map((d) => d.name)))))) : ""),
      el("div", { class: "steps", role: "tablist" }, PASSES.map(([id, title], i) => el("button", {
        type: "button", role: "tab", "aria-selected": String(id === this.pass), onclick: () => { this.pass = id; this.draw(); },
      }, `${i + 1} ${title}`))),
      el("p", { class: "dim" }, words),
      el("div", { class: "scroll" }, this.tableOf(this.pass)));
    return this.root;
  }

  tableOf(pass) {
    return { built: () => this.built(), factors: () => this.factors(), layouts: () => this.layouts(), shards: () => this.shards(), memory: () => this.memory(), program: () => this.steps() }[pass]();
  }

  nodes() {
    const { model } = this;
    const leaves = new Set(model.blocks[this.block].flatMap((n) => model.sources(n)).filter((s) => s >= 0 && model.isLeaf(s)));
    return [...leaves, ...model.blocks[this.block]];
  }

  table(heads, rows) {
    return el("table", {}, el("thead", {}, el("tr", {}, heads.map((h) => el("th", {}, h)))),
      el("tbody", {}, rows.map(({ cells, isNew, node }) => el("tr", { class: isNew ? "new" : "", onclick: node === undefined ? null : () => app.select({ kind: "node", model: this.model, node }) },
        cells.map((c) => el("td", {}, c))))));
  }

  line(node) {
    const { model } = this;
    const read = model.sources(node).map((s) => (s < 0 ? "_" : reference(shortened(model.name(s), 60))));
    return `${model.op(node).name}(${[...read, model.attrs(node)].filter(Boolean).join(", ")})`;
  }

  built() {
    const { model } = this;
    return this.table(["value", "is", "spec"], this.nodes().map((n) => ({ node: n, cells: [reference(shortened(model.name(n), 60)), this.line(n), model.specs(n).join(", ")] })));
  }

  factors() {
    const { model } = this;
    const { axes, factors } = model.passes;
    const symbols = new Map();
    const factorMark = (f) => {
      if (!symbols.has(f)) symbols.set(f, symbols.size < 26 ? String.fromCharCode(97 + symbols.size) : `a${symbols.size}`);
      const [size, isSharded, isBlocked] = factors[f];
      return el("span", { class: `factor${isSharded ? " cut" : ""}`, title: isSharded ? "cut" : isBlocked ? "can never be cut" : "may be cut" }, `${symbols.get(f)}${isBlocked ? "!" : ""}`, el("sub", {}, String(size)));
    };
    const axis = (text) => text.split("|").flatMap((segment, i) => [i ? " | " : "", ...(segment ? segment.split(" ").flatMap((f, j) => [j ? " " : "", factorMark(Number(f))]) : ["1"])]);
    return this.table(["value", "spec", "axes as factors, outer first"], this.nodes().map((n) => ({
      node: n, cells: [reference(shortened(model.name(n), 60)), model.specs(n)[0], el("span", {}, (axes[n] ?? []).flatMap((a, i) => [i ? " , " : "", ...axis(a)]))],
    })));
  }

  layouts() {
    const { model } = this;
    return this.table(["value", "spec", "layout", "in words"], this.nodes().map((n) => {
      const how = layoutWords(model.layout(n), model.devices);
      return { node: n, isNew: how.kind !== "replicate" && how.kind !== "none", cells: [reference(shortened(model.name(n), 60)), model.specs(n)[0], el("span", {}, swatch(how.kind), ` ${how.mark}`), how.words] };
    }));
  }

  /** Positions of the instructions of this block on the chosen device. */
  at() {
    return this.model.plan.programs[this.program].block.flatMap((b, step) => (b === this.block ? [step] : []));
  }

  name(step) { return reference(shortened(this.model.stepName(this.program, step), 60)); }

  shards() {
    const { model } = this;
    const p = model.plan.programs[this.program];
    return this.table(["value", "op", "on this device", "as built"], this.at().map((step) => {
      const isOwn = String(step) in p.own;
      const node = p.node[step];
      const spec = model.plan.specs[p.spec[step]][0];
      const before = isOwn || node < 0 ? "" : model.specs(node)[0];
      return { node: node < 0 ? undefined : node, isNew: isOwn || spec !== before, cells: [this.name(step), p.ops[p.op[step]], spec, isOwn ? "inserted by the planner" : before === spec ? "the same" : before] };
    }));
  }

  memory() {
    const { model } = this;
    const p = model.plan.programs[this.program];
    const at = this.at();
    const [first, last] = [at[0] ?? 0, at.at(-1) ?? 0];
    return this.table(["value", "bytes", "kept", "in use then"], at.map((step) => {
      const end = p.last[step];
      const span = el("span", { class: "span" }, end < 0 ? "" : el("i", { style: { "margin-left": `${(100 * (step - first)) / (last - first + 1)}%`, width: `${Math.max(1, (100 * (Math.min(end, last) - step + 1)) / (last - first + 1))}%` } }));
      return { node: p.node[step] < 0 ? undefined : p.node[step], cells: [this.name(step), bytesText(model.plan.specs[p.spec[step]][1]), end < 0 ? "in a state's own memory" : el("span", {}, `${step} to ${end}`, span), bytesText(p.live[step])] };
    }));
  }

  steps() {
    const { model } = this;
    const p = model.plan.programs[this.program];
    return this.table(["step", "op", "computes", "spec", "reads and writes", "estimate"], this.at().map((step) => {
      const cost = model.costs[p.cost[step]];
      return { node: p.node[step] < 0 ? undefined : p.node[step], isNew: String(step) in p.own, cells: [String(step), p.ops[p.op[step]], this.name(step), model.plan.specs[p.spec[step]][0], bytesText(cost.nbytes || cost.moved), secondsText(cost.seconds)] };
    }));
  }
}
