// The plan: columns are devices, rows are steps in the order in which they run; layers that repeat are folded.

class PlanView {
  constructor(model, side) {
    this.model = model;
    this.side = side; // which of two plans that are compared, or ""
    this.open = new Set();
    this.repetition = new Map(); // of each open group, by its key
    this.heat = "none";
    const works = model.rows.filter((r) => r.op === "work").flatMap((r) => [...r.cells.values()]);
    this.maxima = { seconds: Math.max(1e-12, ...works.map((w) => w.seconds)), took: Math.max(1e-12, ...works.map((w) => w.took)), nbytes: Math.max(1, ...works.map((w) => w.nbytes)) };
    model.graph.tree.forEach((item, i) => { // a pipeline over devices is seen at once
      if (typeof item !== "number" && new Set(item.each.map((one) => this.devicesOf(one))).size > 1) this.open.add(`${i}`);
    });
    this.root = el("div", { class: "plan", style: { "--n": model.devices.length }, "data-side": side });
  }

  devicesOf(one) {
    const blocks = one.items.flatMap((i) => this.model.blocksOf(i));
    return [...new Set(blocks.flatMap((b) => this.model.rowsOf[b]).flatMap((row) => row.devices))].sort().join();
  }

  draw() {
    this.root.replaceChildren(this.heads(), ...this.items(this.model.graph.tree, "", 0));
    return this.root;
  }

  heads() {
    const { devices } = this.model;
    return el("div", { class: "row heads" },
      el("div", { class: "gutter" }, "steps"),
      devices.map((d, n) => {
        const storedBytes = d.held.weight + d.held.state + d.held.constant + d.held.arena;
        return el("div", { class: "device", style: { "--from": n, "--to": n }, title: `${d.name}: ${d.about || d.backend}` },
          el("b", {}, d.name), el("small", {}, bytesText(storedBytes), d.memory ? el("span", { class: "of" }, ` of ${bytesText(d.memory)}`) : ""),
          el("span", { class: "full", "aria-hidden": "true" },
            el("i", { style: { width: `${Math.max(2, d.memory ? Math.min(100, (100 * storedBytes) / d.memory) : 2)}%` } })));
      }),
      el("div", { class: "why" }, "because"));
  }

  *items(items, key, depth) {
    for (const [i, item] of items.entries()) {
      const own = key === "" ? `${i}` : `${key}/${i}`;
      if (typeof item === "number") yield* this.block(item, depth);
      else yield this.group(item, own, depth);
    }
  }

  *block(block, depth) {
    let isFirst = true;
    for (const row of this.model.rowsOf[block]) {
      yield row.op === "work" ? this.work(row, depth, isFirst) : this.collective(row, depth, isFirst);
      isFirst = false;
    }
  }

  // -------------------------------------------------------------------------------------------- groups

  group(item, key, depth) {
    const { model } = this;
    const isOpen = this.open.has(key);
    const rows = model.blocksOf(item).flatMap((b) => model.rowsOf[b]);
    const { each, collectives } = totals(model, rows);
    const box = el("section", { class: `group${isOpen ? " open" : ""}`, "data-group": key });
    const toggle = () => { this.toggle(key, box, item, depth); };
    const header = el("div", { class: "row fold", style: { "--depth": depth } },
      el("button", { type: "button", class: "gutter", "aria-expanded": String(isOpen), onclick: toggle, title: `${item.label}, ${item.each.length} times the same` },
        el("span", { class: "sign", "aria-hidden": "true" }, isOpen ? "▾" : "▸"),
        el("span", { class: "label" }, shortened(item.label, 40)), el("span", { class: "times" }, item.each.length > 1 ? `× ${item.each.length}` : "")),
      merged(each).map((run) => this.cell(run, (work) => [
        ...timeOf(work), ...amountOf(work)], toggle, "all")),
      el("div", { class: "why" }, this.composition(item), collectives.size ? el("span", { class: "meets" }, `${collectivesText(collectives)} in all`) : ""));
    box.append(header);
    if (isOpen) box.append(key.includes(":", key.lastIndexOf("/") + 1) ? this.one(item, key, depth) : this.inside(item, key, depth));
    else box.append(...rows.filter((r) => r.op === "send" && item.each.length === 1).map((r) => this.collective(r, depth, false)));
    return box;
  }

  /** What one repetition is made of. */
  composition(item) {
    const parts = item.each[0].items.map((i) => (typeof i === "number"
      ? plural(this.model.blocks[i].length, "node") : `${i.each.length} × ${plural(i.each[0].items.reduce((n, b) => n + this.model.blocksOf(b).reduce((m, c) => m + this.model.blocks[c].length, 0), 0), "node")}`));
    const shape = parts.join(" + ");
    return item.each.length > 1 ? `${item.each.length} layers alike, each ${shape}. ` : `${shape}. `;
  }

  /** Repetitions that do the same on the same devices, as runs: [{start, count}]. */
  runs(item) {
    const signature = (one) => one.items.flatMap((i) => this.model.blocksOf(i)).flatMap((b) => this.model.rowsOf[b])
      .map((row) => `${row.op} ${row.devices} ${[...row.cells.values()].map((c) => `${c.count} ${c.nbytes}`)}`).join();
    const runs = [];
    item.each.forEach((one, start) => {
      const now = signature(one);
      if (runs.at(-1)?.now === now) runs.at(-1).count += 1;
      else runs.push({ start, count: 1, now });
    });
    return runs;
  }

  /** What is in an open group: one repetition for all where they do the same, else each run of those that do. */
  inside(item, key, depth) {
    const runs = this.runs(item);
    if (runs.length === 1) return this.one(item, key, depth);
    return el("div", { class: "inside" }, runs.map(({ start, count }) => {
      const each = item.each.slice(start, start + count);
      const label = count > 1 ? `${each[0].label} … ${each.at(-1).label}` : each[0].label;
      return this.group({ label, each }, `${key}:${start}`, depth + 1);
    }));
  }

  one(item, key, depth) {
    const at = Math.min(this.repetition.get(key) ?? 0, item.each.length - 1);
    const chosen = item.each[at];
    const pick = (n) => { this.repetition.set(key, n); this.redraw(key, item, depth); };
    const picker = el("div", { class: "picker", style: { "--depth": depth + 1 } },
      el("button", { type: "button", disabled: at === 0, onclick: () => pick(at - 1), "aria-label": "previous" }, "‹"),
      el("select", { "aria-label": "which repetition", onchange: (e) => pick(Number(e.target.value)) },
        item.each.map((one, n) => el("option", { value: n, selected: n === at }, `${one.label}  (${n + 1} of ${item.each.length})`))),
      el("button", { type: "button", disabled: at === item.each.length - 1, onclick: () => pick(at + 1), "aria-label": "next" }, "›"),
      el("button", { type: "button", class: "draw", onclick: () => app.openGraph(this.model, this.graphPath(key)) }, "draw as a graph"));
    return el("div", { class: "inside" }, picker, ...this.items(chosen.items, `${key}`, depth + 1));
  }

  /** The way through the tree to the chosen repetition of a group. */
  graphPath(key) {
    const path = [];
    const parts = key.split("/");
    parts.forEach((part, i) => {
      const [at, start] = part.split(":").map(Number);
      path.push(at, (start || 0) + (this.repetition.get(parts.slice(0, i + 1).join("/")) ?? 0));
    });
    return path;
  }

  toggle(key, box, item, depth) {
    if (this.open.has(key)) this.open.delete(key);
    else this.open.add(key);
    this.redraw(key, item, depth);
  }

  redraw(key, item, depth) {
    const old = this.root.querySelector(`[data-group="${key}"]`);
    const fresh = this.group(item, key, depth);
    old.replaceWith(fresh);
    fresh.querySelector("button.gutter").focus({ preventScroll: true });
  }

  openAll(isOpen) {
    const all = (items, key) => items.forEach((item, i) => {
      if (typeof item === "number") return;
      const own = key === "" ? `${i}` : `${key}/${i}`;
      if (isOpen) this.open.add(own);
      const runs = this.runs(item);
      if (runs.length === 1) all(item.each[0].items, own);
      for (const { start } of runs.length > 1 ? runs : []) {
        if (isOpen) this.open.add(`${own}:${start}`);
        all(item.each[start].items, `${own}:${start}`);
      }
    });
    this.open.clear();
    all(this.model.graph.tree, "");
    this.draw();
  }

  // ---------------------------------------------------------------------------------------------- rows

  gutter(row, depth, isFirst) {
    const steps = [...row.cells.values()].map((c) => c.first);
    const from = Math.min(...steps);
    return el("div", { class: "gutter", style: { "--depth": depth } },
      isFirst ? el("span", { class: "label", title: this.model.graph.labels[row.block] }, shortened(this.model.graph.labels[row.block], 40)) : "",
      el("span", { class: "step", title: "number of the first step on its device" }, `${from}`));
  }

  cell(run, text, onclick, kind) {
    const heat = HEATS[this.heat].of(run.work, kind === "all" ? { seconds: Infinity, took: Infinity, nbytes: Infinity } : this.maxima);
    return el("button", {
      type: "button", class: `cell ${kind}`, onclick, "data-heat": this.heat === "none" ? null : heat.toFixed(3),
      style: { "--from": run.from, "--to": run.to, "--width": run.to - run.from + 1, "--heat": Math.min(1, heat).toFixed(3) },
    }, el("span", { class: "text" }, ...text(run.work)), run.to > run.from ? el("span", { class: "alike" }, `each of ${run.to - run.from + 1}`) : "");
  }

  work(row, depth, isFirst) {
    const works = this.model.devices.map((d, n) => (row.devices.includes(n) ? row.cells.get(d.program) : null));
    return el("div", { class: "row work", "data-row": row.number, style: { "--depth": depth } },
      this.gutter(row, depth, isFirst),
      merged(works).map((run) => this.cell(run, (w) => [
        ...timeOf(w), ...amountOf(w)],
      () => app.select({ kind: "row", model: this.model, row, device: run.from }), "work")),
      el("div", { class: "why", title: row.because.join("\n") }, row.because.join("; ")));
  }

  collective(row, depth, isFirst) {
    const { devices } = this.model;
    const [from, to] = [Math.min(...row.devices), Math.max(...row.devices)];
    const cell = row.cells.get(devices[row.devices[0]].program);
    const speed = devices[row.devices[0]].speeds.link_bandwidth;
    const isCopy = row.op === "send";
    const took = cell.took ? `, took ${secondsText(cell.took)}` : "";
    const text = isCopy
      ? `${bytesText(cell.moved)} to ${devices[row.devices[1]].name} · ${secondsText(cell.seconds)}${took}`
      : `${OP_WORDS[row.op] ?? row.op} · ${bytesText(cell.moved)} each · ${secondsText(cell.seconds)}${took}`;
    const side = to + 1 < devices.length / 2 ? " said-right" : from > devices.length / 2 ? " said-left" : "";
    const direction = isCopy ? `${row.devices[0] < row.devices[1] ? " right" : " left"}${devices.length > 3 ? side || " said-left" : ""}` : "";
    return el("div", { class: `row meet ${row.op}`, "data-row": row.number, style: { "--depth": depth } },
      this.gutter(row, depth, isFirst),
      el("button", {
        type: "button", class: `bar${isCopy ? ` copy${direction}` : ""}`, title: `${row.op}, ${countText(speed, "B/s")} link`,
        style: { "--from": from, "--to": to, "--width": to - from + 1 },
        onclick: () => app.select({ kind: "row", model: this.model, row, device: row.devices[0] }),
      }, el("span", {}, text)),
      el("div", { class: "why", title: row.because.join("\n") }, row.because.join("; ")));
  }

  /** Open what hides a row, bring it into sight and mark it. */
  reveal(number) {
    const row = this.model.rows[number];
    const path = this.model.paths.get(row.block);
    let key = "";
    for (let i = 0; i + 1 < path.length; i += 2) {
      key = key === "" ? `${path[i]}` : `${key}/${path[i]}`;
      this.open.add(key);
      const runs = this.runs(this.model.items(path.slice(0, i + 1))[path[i]]);
      const run = runs.findLast((r) => r.start <= path[i + 1]);
      if (runs.length > 1) this.open.add(key = `${key}:${run.start}`);
      this.repetition.set(key, path[i + 1] - run.start);
    }
    this.draw();
    const element = this.root.querySelector(`[data-row="${number}"]`);
    const bring = () => element?.scrollIntoView({ block: "center" });
    bring();
    requestAnimationFrame(bring); // rows that were never in sight get their heights only now
    this.mark(number);
  }

  mark(number) {
    this.root.querySelector(".chosen")?.classList.remove("chosen");
    this.root.querySelector(`[data-row="${number}"]`)?.classList.add("chosen");
  }
}
