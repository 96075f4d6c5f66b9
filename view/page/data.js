// The data of the page as objects: a Model is one graph and, if there is one, its plan.

const RESULTS = 8; // a value is written as this times its node's number, and which result it is
const LEAVES = new Set(["input", "weight", "state", "constant"]);

const page = JSON.parse(document.getElementById("data").textContent);

class Model {
  constructor(entry) {
    this.graph = entry.graph;
    this.plan = entry.plan ?? null;
    this.passes = entry.passes ?? null;
    const { op, src, block } = this.graph.nodes;
    this.count = op.length;
    this.users = Array.from({ length: this.count }, () => []);
    src.forEach((sources, node) => {
      for (const s of new Set(sources)) if (s >= 0) this.users[Math.floor(s / RESULTS)].push(node);
    });
    this.blocks = this.graph.labels.map(() => []);
    block.forEach((b, node) => b >= 0 && this.blocks[b].push(node));
    this.paths = new Map(); // block → the way to it through the tree: [item, repetition, item, …]
    this.walk(this.graph.tree, []);
    if (this.plan) this.readPlan();
  }

  walk(items, path) {
    items.forEach((item, i) => {
      if (typeof item === "number") this.paths.set(item, [...path, i]);
      else item.each.forEach((one, repetition) => this.walk(one.items, [...path, i, repetition]));
    });
  }

  // --------------------------------------------------------------------------------------------- nodes

  op(node) { return this.graph.ops[this.graph.nodes.op[node]]; }
  name(node) { return this.graph.nodes.name[node]; }
  specs(node) { return this.graph.nodes.spec[node].map((s) => this.graph.specs[s][0]); }
  nbytes(node) { return this.graph.nodes.spec[node].reduce((sum, s) => sum + this.graph.specs[s][1], 0); }
  attrs(node) { return this.graph.attrs[this.graph.nodes.attrs[node]]; }
  block(node) { return this.graph.nodes.block[node]; }
  isLeaf(node) { return LEAVES.has(this.op(node).name); }
  isView(node) { return Boolean(this.op(node).view); }

  /** The nodes a node reads, in order of its operands; -1 for one that was left out. */
  sources(node) { return this.graph.nodes.src[node].map((s) => (s < 0 ? -1 : Math.floor(s / RESULTS))); }

  /** The items of the tree at a path, which names a group's repetition in every second place. */
  items(path) {
    let items = this.graph.tree;
    for (let i = 0; i + 1 < path.length; i += 2) items = items[path[i]].each[path[i + 1]].items;
    return items;
  }

  /** All blocks under an item of the tree. */
  blocksOf(item) {
    return typeof item === "number" ? [item] : item.each.flatMap((one) => one.items.flatMap((i) => this.blocksOf(i)));
  }

  labelOf(item) { return typeof item === "number" ? this.graph.labels[item] : item.label; }

  // ---------------------------------------------------------------------------------------------- plan

  readPlan() {
    const { programs, devices, rows, costs, texts } = this.plan;
    this.devices = devices.map((d, number) => ({ ...d, number }));
    this.costs = costs.map(([flops, nbytes, moved, seconds, uncut]) => ({ flops, nbytes, moved, seconds, uncut }));
    this.rows = rows.map(([op, block, cells, among, because], number) => ({
      number, op, block, devices: among, because: because.map((b) => texts[b]),
      cells: new Map(cells.map(([program, first, count]) => [program, { program, first, count }])),
    }));
    for (const row of this.rows) for (const cell of row.cells.values()) this.price(row, cell);
    this.rowsOf = this.graph.labels.map(() => []);
    for (const row of this.rows) this.rowsOf[row.block].push(row);
    this.steps = new Map(); // node → [{program, step}]
    this.rowAt = programs.map((p) => new Int32Array(p.op.length).fill(-1));
    programs.forEach((program, p) => program.node.forEach((node, step) => {
      if (node < 0 || String(step) in program.own) return;
      if (!this.steps.has(node)) this.steps.set(node, []);
      this.steps.get(node).push({ program: p, step });
    }));
    for (const row of this.rows) {
      for (const { program, first, count } of row.cells.values()) this.rowAt[program].fill(row.number, first, first + count);
    }
  }

  price(row, cell) {
    const { cost } = this.plan.programs[cell.program];
    const sum = { flops: 0, nbytes: 0, moved: 0, seconds: 0, uncut: 0, busy: 0, took: 0 };
    const speeds = this.devices.find((d) => d.program === cell.program).speeds;
    let isSharded = false;
    for (let step = cell.first; step < cell.first + cell.count; step++) {
      const c = this.costs[cost[step]];
      for (const key of ["flops", "nbytes", "moved", "seconds"]) sum[key] += c[key];
      sum.uncut += c.uncut ?? c.seconds;
      sum.took += this.took(cell.program, step);
      sum.busy += Math.max(c.flops / speeds.flops, c.nbytes / speeds.bandwidth);
      isSharded ||= c.uncut !== null;
    }
    Object.assign(cell, sum, { uncut: isSharded && row.op === "work" ? sum.uncut : null });
  }

  /** The seconds that a step took on the devices that run the program, on average; 0 without a trace. */
  took(program, step) {
    if (!this.plan.measured) return 0;
    const among = this.devices.filter((d) => d.program === program);
    return among.reduce((sum, d) => sum + (this.plan.measured.devices[d.number].seconds[step] ?? 0), 0) / among.length;
  }

  /** The longest that a step took on a device. */
  slowest() { return Math.max(1e-12, ...(this.plan.measured?.devices ?? []).flatMap((d) => d.seconds)); }

  /** What an instruction is called: the node it computes, or its own name if it is none of the graph's. */
  stepName(program, step) {
    const p = this.plan.programs[program];
    return p.own[step] ?? (p.node[step] < 0 ? p.ops[p.op[step]] : this.name(p.node[step]));
  }

  stepOp(program, step) { return this.plan.programs[program].ops[this.plan.programs[program].op[step]] ?? ""; }

  layout(node) { return this.plan ? this.plan.texts[this.plan.layouts[node]] : ""; }

  /** The devices that run a program. */
  running(program) { return this.devices.filter((d) => d.program === program); }

  /** Bytes over all links in one run, and what the busiest device sends. */
  crossing() {
    let all = 0;
    const sent = this.devices.map(() => 0);
    for (const row of this.rows) {
      if (row.op === "work") continue;
      const senders = row.op === "send" ? row.devices.slice(0, 1) : row.devices;
      for (const d of senders) {
        const moved = row.cells.get(this.devices[d].program).moved;
        sent[d] += moved;
        all += moved;
      }
    }
    return { all, maxSent: Math.max(0, ...sent), collectives: this.rows.filter((r) => r.op !== "work").length };
  }

  /** The step at which a program needs most memory to compute in. */
  peak(program) {
    const { live } = this.plan.programs[program];
    return live.reduce((best, n, step) => (n > live[best] ? step : best), 0);
  }
}

const models = page.shown.map((entry) => new Model(entry));
