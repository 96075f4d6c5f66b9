// The page as a whole: tabs, what is chosen, keys, light and dark.

const KEYS = [
  ["/", "search"], ["1 2 3", "plan, graph, passes"], ["↑ ↓", "next row; in the graph to sources and users"], ["← →", "beside it in the graph"],
  ["Enter", "open what is chosen"], ["Backspace", "one level up in the graph"], ["Esc", "back to the overview"], ["o", "open or fold all layers"],
  ["m", "the step with the memory peak"], ["+ − 0", "larger, smaller, all"], ["t", "light or dark"], ["?", "these keys"],
];

class App {
  constructor() {
    this.model = models.at(-1);
    this.selection = null;
    this.views = models.map((model, i) => ({
      plan: model.plan ? new PlanView(model, models.length > 1 ? ["before", "after"][i] : "") : null,
      graph: new GraphView(model), passes: model.passes ? new PassesView(model) : null,
    }));
    this.memory = new MemoryView(this.model, byId("memory"));
    this.details = new Details(byId("details"));
    this.search = new Search(byId("search"), byId("results"));
    this.tabs = [["plan", "Plan"], ["graph", "Graph"], ["passes", "Passes"]].filter(([id]) => this.view[id]);
    this.tab = this.tabs[0][0];
  }

  get view() { return this.views[models.indexOf(this.model)]; }

  start() {
    byId("title").textContent = shortened(page.title, 80);
    byId("title").title = page.title;
    byId("tabs").replaceChildren(...this.tabs.map(([id, text], i) => el("button", { type: "button", role: "tab", "data-tab": id, title: `${text} (${i + 1})`, onclick: () => this.go(id) }, text)));
    byId("heat").append(...Object.entries(HEATS).filter(([, { needs }]) => !needs || this.model.plan?.[needs]).map(([id, { label }]) => el("option", { value: id }, label)));
    byId("heat-field").hidden = !this.model.plan;
    byId("heat").addEventListener("change", (e) => this.heat(e.target.value));
    byId("theme").addEventListener("click", () => this.theme());
    byId("help").addEventListener("click", () => this.help());
    byId("keys").append(el("h2", {}, "Keys"), el("dl", {}, KEYS.map(([key, what]) => [el("dt", {}, key), el("dd", {}, what)])), el("form", { method: "dialog" }, el("button", {}, "close")));
    document.addEventListener("keydown", (e) => this.key(e));
    this.go(this.tab);
    this.select(null);
    this.memory.draw();
  }

  go(tab) {
    this.tab = tab;
    document.querySelectorAll("#tabs button").forEach((b) => b.setAttribute("aria-selected", String(b.dataset.tab === tab)));
    document.body.dataset.tab = tab;
    const main = byId("main");
    if (tab === "plan" && models.length > 1) {
      main.replaceChildren(this.moved(), el("div", { class: "pair" }, this.views.map((v, i) => el("div", {}, el("h2", {}, ["Before", "After"][i], ` · ${secondsText(models[i].plan.cost.total)} a run`), v.plan.draw()))));
    } else main.replaceChildren(...(tab === "plan" ? [el("p", { class: "summary" }, withMicroseconds(this.model.plan.summary))] : []), this.view[tab].root);
    if (tab !== "plan" || models.length === 1) this.view[tab].draw();
  }

  moved() {
    return el("details", { class: "moved", open: true }, el("summary", {}, page.moved.length ? `${plural(page.moved.length, "change")}` : "The plans do the same"), el("ul", {}, page.moved.map((m) => el("li", {}, m))));
  }

  select(selection) {
    this.selection = selection;
    if (selection && selection.model !== this.model) { this.model = selection.model; this.memory.model = this.model; this.memory.program = 0; this.memory.draw(); }
    this.details.show(selection);
    if (selection?.kind === "row") this.view.plan.mark(selection.row.number);
    if (selection?.kind === "step" && this.tab === "plan") this.view.plan.reveal(this.model.rowAt[selection.program][selection.step]);
  }

  /** Show a node where one is: in the plan its row, else in the graph. */
  reveal(model, node) {
    this.select({ kind: "node", model, node });
    const where = model.steps?.get(node)?.[0];
    if (this.tab === "plan" && where) this.view.plan.reveal(model.rowAt[where.program][where.step]);
    else if (this.tab !== "passes") {
      if (this.tab !== "graph") this.go("graph");
      this.view.graph.reveal(node);
      this.details.show({ kind: "node", model, node });
    }
  }

  showRow(model, number) {
    this.model = model;
    if (this.tab !== "plan") this.go("plan");
    this.view.plan.reveal(number);
  }

  openGraph(model, path) {
    this.model = model;
    this.view.graph.path = path;
    this.go("graph");
  }

  heat(kind) {
    byId("heat").value = kind;
    for (const { plan, graph } of this.views) { plan.heat = kind; graph.heat = kind; }
    this.go(this.tab);
  }

  theme() {
    const { dataset } = document.documentElement;
    const isDark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    dataset.theme = isDark ? "light" : "dark";
  }

  help() { byId("keys").showModal(); }

  peak() {
    if (this.model.plan) this.select({ kind: "step", model: this.model, program: this.memory.program, step: this.model.peak(this.memory.program) });
  }

  /** The next row that is shown in the plan. */
  nextRow(by) {
    const rows = [...this.view.plan.root.querySelectorAll("[data-row], .fold")];
    const at = rows.findIndex((r) => r.classList.contains("chosen") || r.contains(document.activeElement));
    const row = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))];
    if (!row) return;
    this.view.plan.root.querySelector(".chosen")?.classList.remove("chosen");
    (row.querySelector("button.cell, button.bar, button.gutter") ?? row).focus();
    row.scrollIntoView({ block: "nearest" });
    if (row.dataset.row) {
      const chosen = this.model.rows[Number(row.dataset.row)];
      this.select({ kind: "row", model: this.model, row: chosen, device: chosen.devices[0] });
    } else row.querySelector("button.gutter").focus();
  }

  key(e) {
    if (e.target.matches("input, select, textarea") || e.ctrlKey || e.metaKey || e.altKey || byId("keys").open) return;
    const { drawing } = this.view.graph;
    const inGraph = this.tab === "graph";
    const tab = this.tabs[Number(e.key) - 1];
    const actions = {
      "/": () => { byId("search").focus(); byId("search").select(); }, t: () => this.theme(), "?": () => this.help(), m: () => this.peak(),
      Escape: () => this.select(null), Backspace: () => inGraph && this.view.graph.up(),
      o: () => this.tab === "plan" && this.view.plan.openAll(!this.view.plan.open.size),
      "+": () => inGraph && drawing.scale(drawing.zoom * 1.25), "-": () => inGraph && drawing.scale(drawing.zoom / 1.25),
      ArrowUp: () => (inGraph ? drawing.step(e.key) : this.tab === "plan" && this.nextRow(-1)),
      ArrowDown: () => (inGraph ? drawing.step(e.key) : this.tab === "plan" && this.nextRow(1)),
      ArrowLeft: () => inGraph && drawing.step(e.key), ArrowRight: () => inGraph && drawing.step(e.key),
      0: () => inGraph && drawing.whole(),
    };
    if (tab) this.go(tab[0]);
    else if (e.key === "Enter" && inGraph && drawing.chosen !== null && e.target.closest("button") === null) this.view.graph.enter(drawing.chosen);
    else if (actions[e.key]) { e.preventDefault(); actions[e.key](); }
  }
}

const app = new App();
app.start();
