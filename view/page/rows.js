// Sums over rows of a plan, for folded layers and for the whole.

/** What each device does in some rows: seconds, bytes and nodes; and how the devices meet. */
function totals(model, rows) {
  const each = model.devices.map(() => ({ seconds: 0, nbytes: 0, flops: 0, busy: 0, took: 0, count: 0, moved: 0, uncut: 0, isSharded: false }));
  const collectives = new Map();
  for (const row of rows) {
    if (row.op !== "work") collectives.set(row.op, (collectives.get(row.op) ?? 0) + 1);
    for (const d of row.devices) {
      const cell = row.cells.get(model.devices[d].program);
      const sum = each[d];
      if (row.op === "work") {
        for (const key of ["seconds", "nbytes", "flops", "busy", "took", "count"]) sum[key] += cell[key];
        sum.uncut += cell.uncut ?? cell.seconds;
        sum.isSharded ||= cell.uncut !== null;
      } else if (row.op !== "send" || d === row.devices[0]) sum.moved += cell.moved;
    }
  }
  return { each, collectives };
}

/** Neighbouring devices that do as much as each other, as one block: [{from, to, work}]. */
function merged(works) {
  const runs = [];
  works.forEach((work, d) => {
    const key = work && work.count ? `${work.count} ${work.nbytes} ${work.seconds.toPrecision(4)} ${work.took.toPrecision(2)}` : "";
    const last = runs.at(-1);
    if (last && last.key === key) last.to = d;
    else runs.push({ key, from: d, to: d, work });
  });
  return runs.filter((r) => r.key);
}

/** Seconds as measured and as estimated, or only as estimated without a trace. */
const timeOf = (w) => (w.took
  ? [el("b", { title: "measured" }, secondsText(w.took)), el("span", { class: "took", title: "predicted" }, ` predicted ${secondsText(w.seconds)}`)]
  : [el("b", {}, secondsText(w.seconds))]);

/** Nodes and bytes of some work: a narrow cell leaves out the bytes, then both. */
const amountOf = (w) => [el("span", { class: "count" }, ` ${plural(w.count, "node")}`), el("span", { class: "size" }, ` · ${bytesText(w.nbytes)}`)];

const collectivesText = (collectives) => [...collectives].map(([op, n]) => `${n} × ${OP_WORDS[op] ?? op}`).join(", ");

/** What heat shows of some work, from 0 to 1; `maxima` are the largest values in the plan. */
const HEATS = {
  none: { label: "off", of: () => 0 },
  time: { label: "time", of: (w, maxima) => w.seconds / maxima.seconds },
  took: { label: "measured time", of: (w, maxima) => w.took / maxima.took, needs: "measured" },
  bytes: { label: "bytes", of: (w, maxima) => w.nbytes / maxima.nbytes },
  roofline: { label: "share of roofline", of: (w) => (w.seconds ? w.busy / w.seconds : 0) },
};
