// Search over names, ops and specs of nodes.

const MAX_FOUND = 60;

class Search {
  constructor(field, list) {
    this.field = field;
    this.list = list;
    this.at = 0;
    field.addEventListener("input", () => this.run());
    field.addEventListener("focus", () => field.value && this.run());
    field.addEventListener("keydown", (e) => this.key(e));
    document.addEventListener("pointerdown", (e) => { if (!list.contains(e.target) && e.target !== field) this.close(); });
  }

  run() {
    const words = this.field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const { model } = app;
    this.found = [];
    let count = 0;
    if (words.length) {
      for (let n = 0; n < model.count; n++) {
        const text = `%${model.name(n)} ${model.op(n).name} ${model.specs(n).join(" ")}`.toLowerCase();
        if (!words.every((w) => text.includes(w))) continue;
        count += 1;
        if (this.found.length < MAX_FOUND) this.found.push(n);
      }
    }
    this.at = 0;
    this.list.hidden = !words.length;
    this.list.replaceChildren(
      el("p", { class: "dim" }, count ? `${plural(count, "node")}${count > MAX_FOUND ? `, the first ${MAX_FOUND}` : ""}` : "nothing has such a name, op or spec"),
      ...this.found.map((n, i) => el("button", { type: "button", class: i ? "" : "at", onclick: () => this.choose(i) },
        el("b", {}, model.op(n).name), ` ${reference(shortened(model.name(n), 80))} `, el("span", { class: "dim" }, model.specs(n)[0]))));
  }

  key(e) {
    if (e.key === "Escape") { this.close(); this.field.blur(); }
    if (this.list.hidden || !this.found.length) return;
    if (e.key === "ArrowDown" || e.key === "ArrowUp") {
      e.preventDefault();
      const buttons = this.list.querySelectorAll("button");
      buttons[this.at].classList.remove("at");
      this.at = (this.at + (e.key === "ArrowDown" ? 1 : this.found.length - 1)) % this.found.length;
      buttons[this.at].classList.add("at");
      buttons[this.at].scrollIntoView({ block: "nearest" });
    }
    if (e.key === "Enter") this.choose(this.at);
  }

  choose(i) {
    const node = this.found[i];
    this.close();
    this.field.blur();
    app.reveal(app.model, node);
  }

  close() { this.list.hidden = true; }
}
