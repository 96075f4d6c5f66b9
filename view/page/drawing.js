// A drawing of boxes and arrows that can be moved, enlarged and walked by keys.

const CHARACTER = 6.7; // pixels of a letter of the fixed-width font at 11 pixels
const LINE = 15;

class Drawing {
  constructor(onselect, onopen) {
    this.onselect = onselect;
    this.onopen = onopen;
    this.zoom = 1;
    this.canvas = svg("svg", { class: "canvas", role: "group", "aria-label": "graph" });
    this.frame = el("div", { class: "frame" }, this.canvas);
    this.frame.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      this.scale(this.zoom * Math.exp(-e.deltaY / 300), e);
    }, { passive: false });
    this.drag();
  }

  /** Boxes are {id, lines: [{text, class}], kind, heat, title}; arrows {from, to, class}. */
  show(boxes, arrows) {
    for (const box of boxes) {
      const longest = Math.max(...box.lines.map((l) => l.text.length * (l.wide ?? 1)));
      box.width = Math.max(56, longest * CHARACTER + 22);
      box.height = box.lines.length * LINE + 12;
    }
    this.boxes = new Map(boxes.map((b) => [b.id, b]));
    this.arrows = arrows;
    const placed = layOut(boxes, arrows);
    this.places = placed.boxes;
    this.size = placed;
    const lines = placed.arrows.map((a) => svg("path", { d: curve(a.points), class: `arrow ${a.class ?? ""}`, "marker-end": "url(#tip)" }, svg("title", {}, a.title ?? "")));
    this.canvas.replaceChildren(patterns(), svg("g", { class: "arrows" }, lines), svg("g", { class: "boxes" }, boxes.map((b) => this.box(b))));
    this.chosen = null;
    this.fit();
  }

  box(box) {
    const { x, y } = this.places.get(box.id);
    const [left, top] = [x - box.width / 2, y - box.height / 2];
    const g = svg("g", {
      class: `box ${box.kind ?? ""}`, transform: `translate(${left} ${top})`, role: "button", tabindex: "-1", "data-id": box.id,
      "aria-label": box.lines.map((l) => l.text).join(", "), style: { "--heat": box.heat ?? 0 },
      onclick: () => this.select(box.id), ondblclick: () => this.onopen(box.id),
    }, svg("title", {}, box.title ?? ""),
    svg("rect", { width: box.width, height: box.height, rx: box.round ?? 5, class: "ground" }),
    box.hatch ? svg("rect", { width: 9, height: box.height, rx: 4, class: `hatch ${box.hatch}`, fill: `url(#hatch-${box.hatch})` }) : null,
    box.lines.map((l, i) => svg("text", { x: 15, y: 17 + i * LINE, class: l.class ?? "" }, l.text)));
    return g;
  }

  select(id, isQuiet = false) {
    this.canvas.querySelectorAll(".chosen, .near").forEach((n) => n.classList.remove("chosen", "near"));
    this.chosen = id;
    const element = this.canvas.querySelector(`[data-id="${id}"]`);
    if (!element) return;
    element.classList.add("chosen");
    const paths = this.canvas.querySelectorAll(".arrow");
    this.arrows.forEach((a, i) => (a.from === id || a.to === id) && paths[i].classList.add("near"));
    this.bring(id);
    if (!isQuiet) this.onselect(id);
  }

  /** The next box along the arrows: its sources above, its users below, neighbours of the same source beside. */
  step(key) {
    if (this.chosen === null) { this.select(this.boxes.keys().next().value); return; }
    const here = this.places.get(this.chosen);
    const linked = { ArrowUp: (a) => a.to === this.chosen && a.from, ArrowDown: (a) => a.from === this.chosen && a.to }[key];
    let options;
    if (linked) options = this.arrows.map(linked).filter((id) => id !== false);
    else options = [...this.places].filter(([, p]) => (key === "ArrowLeft" ? p.x < here.x - 1 : p.x > here.x + 1)).map(([id]) => id);
    const away = (id) => { const p = this.places.get(id); return linked ? Math.abs(p.x - here.x) : Math.hypot(p.x - here.x, 4 * (p.y - here.y)); };
    options.sort((a, b) => away(a) - away(b));
    if (options.length) this.select(options[0]);
  }

  // ---------------------------------------------------------------------------------------------- sight

  scale(zoom, around = null) {
    const before = this.zoom;
    this.zoom = Math.min(3, Math.max(0.08, zoom));
    const { frame } = this;
    const [x, y] = around ? [around.offsetX, around.offsetY] : [frame.clientWidth / 2, frame.clientHeight / 2];
    const [left, top] = [(frame.scrollLeft + x) * (this.zoom / before) - x, (frame.scrollTop + y) * (this.zoom / before) - y];
    this.apply();
    frame.scrollTo(left, top);
  }

  apply() {
    const { left, width, height } = this.size;
    this.canvas.setAttribute("viewBox", `${left} 0 ${width} ${height}`);
    this.canvas.setAttribute("width", width * this.zoom);
    this.canvas.setAttribute("height", height * this.zoom);
  }

  /** All of it if that can be read, else its top. */
  fit() {
    const room = this.frame.clientWidth / this.size.width;
    this.zoom = Math.min(1.1, Math.max(0.8, room || 1));
    this.apply();
    this.frame.scrollTo(Math.max(0, (this.size.width * this.zoom - this.frame.clientWidth) / 2), 0);
  }

  whole() {
    this.zoom = Math.min(1.5, this.frame.clientWidth / this.size.width, this.frame.clientHeight / this.size.height);
    this.apply();
  }

  bring(id) {
    const { x: at, y } = this.places.get(id);
    const { frame, zoom } = this;
    const x = at - this.size.left;
    const [left, top] = [x * zoom - frame.scrollLeft, y * zoom - frame.scrollTop];
    const isSeen = left > 40 && top > 30 && left < frame.clientWidth - 40 && top < frame.clientHeight - 30;
    if (!isSeen) frame.scrollTo(x * zoom - frame.clientWidth / 2, y * zoom - frame.clientHeight / 2);
  }

  drag() {
    let start = null;
    this.frame.addEventListener("pointerdown", (e) => {
      if (e.pointerType === "touch" || e.button || e.target.closest(".box")) return;
      start = { x: e.clientX + this.frame.scrollLeft, y: e.clientY + this.frame.scrollTop };
      this.frame.setPointerCapture(e.pointerId);
    });
    this.frame.addEventListener("pointermove", (e) => start && this.frame.scrollTo(start.x - e.clientX, start.y - e.clientY));
    for (const end of ["pointerup", "pointercancel"]) this.frame.addEventListener(end, () => { start = null; });
  }
}

function curve(points) {
  let d = `M${points[0].x} ${points[0].y}`;
  for (let i = 1; i < points.length - 1; i++) {
    const [p, q] = [points[i], points[i + 1]];
    const [x, y] = i === points.length - 2 ? [q.x, q.y] : [(p.x + q.x) / 2, (p.y + q.y) / 2];
    d += `Q${p.x} ${p.y} ${x} ${y}`;
  }
  return points.length === 2 ? `${d}L${points[1].x} ${points[1].y}` : d;
}

/** Hatches, so that layouts differ without colour, and the tip of arrows. */
function patterns() {
  const hatch = (kind, ...marks) => svg("pattern", { id: `hatch-${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
    svg("rect", { width: 6, height: 6, class: `ink-${kind}` }), ...marks);
  const stroke = { class: "hatch-line", "stroke-width": 1.4 };
  return svg("defs", {},
    hatch("replicate"),
    hatch("shard", svg("path", { d: "M-1 7 7 -1M-4 4 4 -4M2 10 10 2", ...stroke })),
    hatch("partial", svg("path", { d: "M-1 7 7 -1M-1 -1 7 7", ...stroke })),
    hatch("local", svg("path", { d: "M0 3H6", ...stroke })),
    svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" },
      svg("path", { d: "M0 0L8 4L0 8z", class: "tip" })));
}
