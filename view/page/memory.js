// Memory: the bytes that each device holds, and its working memory step by step.

const CHART = { width: 900, height: 120, top: 16, bottom: 16 };
const KINDS = [["weight", "weights"], ["state", "states"], ["constant", "constants"], ["arena", "working memory"]];

class MemoryView {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.program = 0;
  }

  draw() {
    const { model } = this;
    if (!model.plan) { this.root.replaceChildren(); this.root.hidden = true; return; }
    this.root.hidden = false;
    const storedBytes = model.devices.map((d) => KINDS.reduce((n, [kind]) => n + d.held[kind], 0));
    const maxBytes = Math.max(...storedBytes.map((n, i) => Math.min(model.devices[i].memory ?? n, 4 * Math.max(...storedBytes))), ...storedBytes);
    const bars = el("div", { class: "held" }, model.devices.map((d, n) => el("button", {
      type: "button", class: `holding${d.program === this.program ? " chosen" : ""}`,
      onclick: () => { this.program = d.program; this.draw(); app.select({ kind: "device", model, device: n }); },
      title: KINDS.map(([kind, words]) => `${words}: ${bytesText(d.held[kind])}`).join("\n"),
    }, el("span", { class: "name" }, d.name),
    el("span", { class: "stack" }, KINDS.map(([kind]) => d.held[kind] ? el("i", { class: kind, style: { width: `${Math.max(0.6, (100 * d.held[kind]) / maxBytes)}%` } }) : "")),
    el("span", { class: "sum" }, bytesText(storedBytes[n])))));
    const key = el("p", { class: "key" }, KINDS.map(([kind, words]) => el("span", {}, el("i", { class: kind }), words)), el("span", {}, `full width: ${bytesText(maxBytes)}`));
    this.root.replaceChildren(el("div", { class: "holds" }, el("h2", {}, "Memory"), bars, key), this.chart());
  }

  chart() {
    const { model, program } = this;
    const { live, kept } = model.plan.programs[program];
    const peak = model.peak(program);
    const top = Math.max(1, live[peak] ?? 1);
    const { width, height } = CHART;
    const y = (n) => height - CHART.bottom - ((height - CHART.top - CHART.bottom) * n) / top;
    const x = (step) => (width * (step + 0.5)) / Math.max(1, live.length);
    const columns = Math.min(live.length, width);
    let d = `M0 ${y(0)}`;
    for (let c = 0; c < columns; c++) {
      const [from, to] = [Math.floor((c * live.length) / columns), Math.max(1, Math.floor(((c + 1) * live.length) / columns))];
      const n = live.slice(from, to).reduce((a, b) => Math.max(a, b), 0);
      d += `L${((width * c) / columns).toFixed(1)} ${y(n).toFixed(1)}L${((width * (c + 1)) / columns).toFixed(1)} ${y(n).toFixed(1)}`;
    }
    const devices = deviceText(model.running(program).map((dev) => dev.name));
    const cursor = svg("line", { class: "cursor", y1: CHART.top, y2: height - CHART.bottom, x1: -9, x2: -9 });
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "live", role: "img", "aria-label": `memory over ${live.length} steps on ${devices}` },
      this.bands(x), svg("path", { d: `${d}L${width} ${y(0)}Z`, class: "area" }), cursor,
      svg("line", { class: "peak-line", x1: x(peak), x2: x(peak), y1: CHART.top - 6, y2: height - CHART.bottom }));
    const stepAt = (e) => {
      const box = picture.getBoundingClientRect();
      return Math.max(0, Math.min(live.length - 1, Math.floor(((e.clientX - box.left) / box.width) * live.length)));
    };
    const status = el("span", { class: "said" });
    picture.addEventListener("pointermove", (e) => {
      const step = stepAt(e);
      cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step));
      status.textContent = `step ${step}: ${bytesText(live[step])}, ${reference(shortened(model.stepName(program, step), 60))}`;
    });
    picture.addEventListener("click", (e) => app.select({ kind: "step", model, program, step: stepAt(e) }));
    const programs = model.plan.programs.length > 1
      ? el("select", { "aria-label": "devices", onchange: (e) => { this.program = Number(e.target.value); this.draw(); } },
        model.plan.programs.map((_, p) => el("option", { value: p, selected: p === program }, deviceText(model.running(p).map((dev) => dev.name)))))
      : el("b", {}, devices);
    const at = (100 * x(peak)) / width;
    return el("div", { class: "chart" },
      el("div", { class: "line" }, el("span", {}, "Working memory of ", programs), status),
      el("div", { class: "plot" },
        el("button", { type: "button", class: "peak", style: at < 60 ? { left: `${at}%` } : { right: `${100 - at}%` }, onclick: () => app.select({ kind: "step", model, program, step: peak }) },
          at < 60 ? `▼ peak ${bytesText(live[peak] ?? 0)} at step ${peak}` : `peak ${bytesText(live[peak] ?? 0)} at step ${peak} ▼`), picture),
      el("div", { class: "line dim" }, el("span", {}, "step 0"), kept ? el("span", {}, `${bytesText(kept)} are kept to the end, for the rollback of a failed run`) : "", el("span", {}, `step ${live.length - 1}`)));
  }

  /** Where each repetition of a group runs, light and dark in turn. */
  bands(x) {
    const { model, program } = this;
    const { block } = model.plan.programs[program];
    const bands = [];
    let number = 0;
    for (let from = 0; from < block.length;) {
      let to = from;
      while (to < block.length && block[to] === block[from]) to += 1;
      if (number % 2) bands.push(svg("rect", { class: "band", x: x(from - 0.5), width: x(to) - x(from), y: CHART.top, height: CHART.height - CHART.top - CHART.bottom }));
      number += 1;
      from = to;
    }
    return svg("g", {}, bands);
  }
}
