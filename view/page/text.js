// Numbers and names as people read them.

const scaled = (n, units, base) => {
  let at = 0;
  while (n >= base && at + 1 < units.length) { n /= base; at += 1; }
  return `${at && n < 100 ? n.toPrecision(n < 10 ? 2 : 3) : Math.round(n)} ${units[at]}`;
};

const bytesText = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const countText = (n, unit) => scaled(n, ["", "k", "M", "G", "T", "P"].map((prefix) => prefix + unit), 1000);
const secondsText = (s) => {
  if (s === 0) return "0";
  const [value, unit] = s < 1e-3 ? [s * 1e6, "µs"] : s < 1 ? [s * 1e3, "ms"] : [s, "s"];
  return `${Number(value.toPrecision(3))} ${unit}`;
};
/** A report of the planner with the unit of `secondsText`. */
const withMicroseconds = (text) => text.replace(/(\d) us\b/g, "$1 µs");
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const shortened = (text, limit) => (text.length > limit ? `${text.slice(0, limit - 1)}…` : text);
/** A name without its middle: what tells weights apart stands at the end. */
const clipped = (text, limit) => (text.length > limit ? `${text.slice(0, Math.floor(limit / 3))}…${text.slice(1 - Math.ceil((2 * limit) / 3))}` : text);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

/** A node as a dump refers to it. */
const reference = (name) => `%${name}`;

/** Names of devices, consecutive numbers drawn together: cuda:0–3. */
function deviceText(names) {
  const runs = [];
  for (const name of names) {
    const [, head, number] = /^(.*?)(\d+)$/.exec(name) ?? [null, name, ""];
    const last = runs.at(-1);
    if (last && number !== "" && last.head === head && last.to + 1 === Number(number)) last.to = Number(number);
    else runs.push({ head, from: number === "" ? "" : Number(number), to: Number(number) });
  }
  return runs.map((r) => (r.from === "" || r.from === r.to ? `${r.head}${r.from}` : `${r.head}${r.from}–${r.to}`)).join(", ");
}

/** The layout of a value: its kind, and in words. */
function layoutWords(text, devices) {
  if (!text) return { kind: "none", mark: "", words: "is not kept on any device" };
  if (text === "R") return { kind: "replicate", mark: "R", words: devices.length > 1 ? "whole on each device" : "whole" };
  if (text === "P") return { kind: "partial", mark: "P", words: "each device has a summand; they are not added yet" };
  if (text[0] === "L") {
    const where = text.slice(1).split(",").map((d) => devices[d].name);
    return { kind: "local", mark: deviceText(where), words: `whole on ${deviceText(where)} only` };
  }
  const [, axis, sizes] = /^S(\d+)\((.*)\)$/.exec(text);
  const parts = sizes.split("|");
  const runs = new Set(parts).size === 1 ? `${parts[0]} on each device` : parts.map((n, d) => `${n} on ${devices[d].name}`).join(", ");
  return { kind: "shard", mark: `S${axis}`, words: `sharded along axis ${axis}: ${runs}` };
}

/** Layouts in words, of which one holds; what all begin with is said once. */
function eitherWords(words) {
  const [first, ...others] = words.slice(0, 3);
  const [start] = /^(.*?: )?/.exec(first);
  const rest = others.map((w) => (w.startsWith(start) ? w.slice(start.length) : w));
  return [first, ...rest, ...(words.length > 3 ? [`${words.length - 3} other ways`] : [])].join(", or ");
}

const OP_WORDS = {
  all_reduce: "sum over devices", all_gather: "gather", reduce_scatter: "sum to shards", all_to_all: "recut", send: "copy",
};
